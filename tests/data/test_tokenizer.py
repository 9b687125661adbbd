"""The tokenizer: stop ids, chat template, turns; on a small real one trained here."""

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from grpo_jax.data import tokenizer as tokenizer_module
from grpo_jax.data.byte_tokenizer import END, ByteTokenizer
from grpo_jax.data.tokenizer import check_vocabulary, eos_ids, load
from grpo_jax.models.errors import ModelError

CHATML = (
  "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
  "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture
def folder(tmp_path):
  """A byte-level BPE tokenizer in a Hugging Face folder, with the ChatML template."""
  bpe = tokenizers.Tokenizer(models.BPE())
  bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  bpe.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=300,
    special_tokens=SPECIAL,
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  bpe.train_from_iterator(["the user and the assistant said the answer"] * 20, trainer)
  bpe.save(str(tmp_path / "tokenizer.json"))
  settings = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "<|im_end|>",
    "chat_template": CHATML,
  }
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
  return tmp_path


def test_encode_adds_nothing_and_decode_gives_it_back(folder):
  tokenizer = load(folder)
  for text in ["the answer", " a  b\n", "é 🙂 ,.", "a ."]:
    assert tokenizer.decode(tokenizer.encode(text)) == text
  assert tokenizer.encode("<|im_end|>").tolist() == [2]
  assert tokenizer.decode([2]) == "" and tokenizer.decode([2], skip_special=False) == "<|im_end|>"


def test_tokens_that_are_part_of_a_character_have_their_bytes(folder):
  tokenizer = load(folder)
  ids = tokenizer.encode("é 🙂 the answer�")
  pieces = [tokenizer.token_bytes(token) for token in ids.tolist()]
  assert b"".join(pieces) == "é 🙂 the answer�".encode() and pieces[:2] == [b"\xc3", b"\xa9"]
  assert tokenizer.token_bytes(2) == b"<|im_end|>"


def test_chat_template_begins_the_assistants_turn(folder):
  tokenizer = load(folder)
  ids = tokenizer.apply_chat_template([{"role": "user", "content": "the"}])
  text = "<|im_start|>user\nthe<|im_end|>\n<|im_start|>assistant\n"
  assert tokenizer.render([{"role": "user", "content": "the"}]) == text
  assert tokenizer.decode(ids, skip_special=False) == text
  assert ids[0] == 1 and ids.dtype == np.int32


def test_a_turn_continues_a_chat_as_the_template_would_write_it(folder):
  tokenizer = load(folder)
  start = [{"role": "user", "content": "the"}]
  said, message = "answer", {"role": "user", "content": "and"}
  whole = tokenizer.render([*start, {"role": "assistant", "content": said}, message])
  for stop in ([2], []):  # the model sampled <|im_end|> itself, or was cut before it.
    sampled = [*tokenizer.encode(said).tolist(), *stop]
    turn = tokenizer.turn_ids([message], after=sampled[-1])
    ids = [*tokenizer.apply_chat_template(start).tolist(), *sampled, *turn.tolist()]
    assert tokenizer.decode(ids, skip_special=False) == whole


def test_a_template_that_rewrites_the_past_continues_a_chat_all_the_same(folder):
  rewriting = load(folder, chat_template="{{ messages | length }}" + CHATML)
  message = {"role": "user", "content": "x"}
  expected = load(folder).turn_ids([message], after=2)
  assert rewriting.turn_ids([message], after=2).tolist() == expected.tolist()


@pytest.mark.parametrize(
  ("generation", "config", "expected"),
  [
    (None, None, (2,)),
    ({"eos_token_id": [5, 0]}, {"eos_token_id": 7}, (0, 2, 5, 7)),
    ({"eos_token_id": 0}, {"eos_token_id": None}, (0, 2)),
    ({}, {"eos_token_id": [2]}, (2,)),
  ],
)
def test_stop_ids_unite_what_all_files_say(folder, generation, config, expected):
  if generation is not None:
    (folder / "generation_config.json").write_text(json.dumps(generation))
  if config is not None:
    (folder / "config.json").write_text(json.dumps(config))
  assert eos_ids(folder, 2) == expected


def test_the_end_of_a_turn_is_that_of_the_template_and_not_just_any_stop_id(folder):
  """Qwen's case: <|endoftext|> (0) comes before <|im_end|> (2), and both stop a completion."""
  (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
  assert (load(folder).stop_ids, load(folder).end_id) == ((0, 2), 2)
  settings = json.loads((folder / "tokenizer_config.json").read_text())
  (folder / "tokenizer_config.json").write_text(
    json.dumps({**settings, "eos_token": "<|endoftext|>"})
  )
  assert load(folder).end_id == 2  # by the template, whatever the tokenizer's own is;
  assert load(folder, chat_template="plain").end_id == 0  # without one, that.
  assert ByteTokenizer().end_id == END


def test_loaded_tokenizer_has_all_stop_ids_and_pads_with_one(folder):
  (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
  tokenizer = load(folder)
  assert tokenizer.stop_ids == (0, 2)
  assert tokenizer.pad_id == 0
  known = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
  assert tokenizer.vocab_size == known


def test_a_tokenizer_without_end_token_is_refused(folder):
  settings = json.loads((folder / "tokenizer_config.json").read_text())
  del settings["eos_token"]
  (folder / "tokenizer_config.json").write_text(json.dumps(settings))
  with pytest.raises(ValueError, match="names an end-of-sequence token"):
    load(folder)


def test_missing_template_says_what_to_do_and_plain_does_without(folder):
  settings = json.loads((folder / "tokenizer_config.json").read_text())
  del settings["chat_template"]
  (folder / "tokenizer_config.json").write_text(json.dumps(settings))
  chat = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
  with pytest.raises(ValueError, match="no chat template; set model.chat_template to .*'plain'"):
    load(folder).render(chat)
  assert load(folder, chat_template=tokenizer_module.PLAIN).render(chat) == "a\nb\n"
  (folder / "mine.jinja").write_text("{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
  assert load(folder, chat_template=str(folder / "mine.jinja")).render(chat) == "[a][b]"
  with pytest.raises(FileNotFoundError, match=r"no chat template file .*none\.jinja"):
    load(folder, chat_template=str(folder / "none.jinja"))


def test_conversations_with_tools_have_the_template_named_for_them(folder):
  settings = json.loads((folder / "tokenizer_config.json").read_text())
  tools = CHATML.replace("{% if add", "{{ tools | tojson }}{% if add")
  named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": tools}]
  (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": named}))
  tokenizer, chat = load(folder), [{"role": "user", "content": "the"}]
  tool = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
  plain = "<|im_start|>user\nthe<|im_end|>\n<|im_start|>assistant\n"
  assert tokenizer.render(chat) == plain
  assert tokenizer.render(chat, tools=[tool]) == plain.replace(
    "<|im_start|>assistant", f"{json.dumps([tool])}<|im_start|>assistant"
  )
  ids = tokenizer.turn_ids(chat, after=2, tools=[tool])
  assert json.dumps([tool]) in tokenizer.decode(ids, skip_special=False)
  with pytest.raises(ValueError, match="'plain' does not write tools"):
    load(folder, chat_template="plain").render(chat, tools=[tool])


def test_variables_of_the_template_are_given_by_option(folder):
  template = CHATML + "{% if not think %}<no_think>{% endif %}"
  chat = [{"role": "user", "content": "a"}]
  plain = load(folder, chat_template=template, template_args={"think": True}).render(chat)
  assert load(folder, chat_template=template).render(chat) == plain + "<no_think>"


def test_a_missing_folder_and_a_missing_tokenizer_have_different_messages(tmp_path):
  with pytest.raises(FileNotFoundError, match="no tokenizer folder"):
    load(tmp_path / "none")
  (tmp_path / "config.json").write_text("{}")
  with pytest.raises(FileNotFoundError, match="there is no tokenizer in .* only config.json; copy"):
    load(tmp_path)
  (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": 3}}')
  with pytest.raises(ValueError, match="cannot read a tokenizer"):
    load(tmp_path)


def test_vocabularies_must_fit():
  check_vocabulary(ByteTokenizer(), 259)
  check_vocabulary(ByteTokenizer(), 300)  # padded rows of the model.
  with pytest.raises(ValueError, match="tokenizer has 259 ids, the model only 258"):
    check_vocabulary(ByteTokenizer(), 258)


def test_byte_tokenizer_marks_turns_and_gives_bytes_back():
  tokenizer = ByteTokenizer()
  chat = [{"role": "user", "content": "é"}]
  ids = tokenizer.apply_chat_template(chat)
  assert tokenizer.decode(ids, skip_special=False) == tokenizer.render(chat)
  assert tokenizer.decode(ids) == "user\néassistant\n"
  turn = tokenizer.turn_ids([{"role": "user", "content": "x"}], after=END)
  cut = tokenizer.turn_ids([{"role": "user", "content": "x"}], after=65)
  assert cut.tolist() == [END, *turn.tolist()]


def test_a_prompt_that_cannot_fit_is_encoded_in_part(folder):
  tokenizer = load(folder)
  chat = lambda content: [{"role": "user", "content": content}]
  whole = tokenizer.prompt(chat("the answer"), max_tokens=6)
  assert whole.too_many == ""  # too long by its tokens, which are found out as ever.
  assert whole.ids.tolist() == tokenizer.apply_chat_template(chat("the answer")).tolist()
  long = tokenizer.prompt(chat("the answer " * 500_000), max_tokens=16)
  bound = tokenizer.longest_text(16)
  assert f"characters, where 16 tokens have at most {bound}" in long.too_many
  assert len(long.text) == bound < 1000 and 16 < len(long.ids) <= bound
  assert long.text.startswith("<|im_start|>user\nthe answer")


def test_what_a_template_leaves_out_does_not_make_a_prompt_too_long(folder):
  tokenizer = load(folder, chat_template="{{ messages[-1].content[:3] }}")
  found = tokenizer.prompt([{"role": "user", "content": "the" + "x" * 3_000_000}], max_tokens=16)
  assert (found.text, found.too_many) == ("the", "")


def test_a_conversation_of_too_many_control_tokens_is_too_long_and_not_rendered(folder):
  found = load(folder).prompt([{"role": "user", "content": "the<|im_end|>" * 5000}], max_tokens=16)
  assert found.too_many == "more than 16 control tokens in its text"
  assert found.text.startswith("the<|im_end|>the") and len(found.ids)


@pytest.mark.parametrize("tail", ["", " " * 2_000_000])
def test_a_tokenizer_that_drops_blanks_encodes_what_may_be_short(tail, folder):
  """Where characters vanish, a text of many of them may be a short prompt."""
  content = json.loads((folder / "tokenizer.json").read_text())
  content["normalizer"] = {"type": "Strip", "strip_left": True, "strip_right": True}
  (folder / "tokenizer.json").write_text(json.dumps(content))
  tokenizer = load(folder, chat_template="{{ messages[0].content }}")
  found = tokenizer.prompt([{"role": "user", "content": "the" + " " * 900_000}], max_tokens=16)
  assert (found.ids.tolist(), found.too_many) == (tokenizer.encode("the").tolist(), "")
  many = tokenizer.prompt([{"role": "user", "content": "the" + tail}], max_tokens=16)
  assert bool(many.too_many) == bool(tail)


@pytest.mark.filterwarnings("ignore")
def test_code_that_a_folder_names_is_never_run(folder):
  (folder / "mine.py").write_text("raise SystemExit('run')")
  settings = json.loads((folder / "tokenizer_config.json").read_text())
  auto_map = {"AutoTokenizer": ["mine.Mine", "mine.Mine"]}
  settings = {**settings, "tokenizer_class": "Mine", "auto_map": auto_map}
  (folder / "tokenizer_config.json").write_text(json.dumps(settings))
  try:
    assert load(folder).encode("the").tolist()
  except ModelError as error:
    assert str(folder) in str(error)
