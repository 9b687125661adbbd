"""What a tokenizer puts at the beginning of a text: once in each prompt without a template."""

import pytest
import transformers

from grpo_jax.data import tokenizer
from tests.data import beginnings

BOS, EOS = 1, 2
TEXTS = ("1 + 2 = ?", " a b", "\na", "a")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
  """Folders of the tokenizers, by kind."""
  root = tmp_path_factory.mktemp("beginnings")
  for kind in beginnings.KINDS:
    (root / kind).mkdir()
    beginnings.write(kind, root / kind)
  return {kind: root / kind for kind in beginnings.KINDS}


def test_a_prompt_begins_with_the_tokens_that_the_tokenizer_adds(folders):
  """The oracle is transformers' call of the tokenizer, whose EOS at the end is not wanted."""
  wrong = []
  for kind, folder in folders.items():
    oracle = transformers.AutoTokenizer.from_pretrained(folder)
    ours = tokenizer.load(folder, chat_template="plain")
    for text in TEXTS:
      wanted = oracle(f"{text}\n")["input_ids"]
      wanted = wanted[:-1] if wanted[-1] == EOS else wanted
      chat = [{"role": "user", "content": text}]
      found = ours.prompt(chat, max_tokens=99).ids.tolist()
      again = ours.apply_chat_template(chat).tolist()
      raw = ours.encode(f"{text}\n", begins=True).tolist()
      if not found == again == raw == wanted:
        wrong.append((kind, text, found, wanted))
    has_bos = kind not in ("qwen", "eos")
    assert (found[0] == BOS) == has_bos, kind
  assert not wrong


def test_it_is_there_once_and_only_at_the_beginning(folders):
  for kind, folder in folders.items():
    ours = tokenizer.load(folder, chat_template="plain")
    chat = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    assert ours.apply_chat_template(chat).tolist().count(BOS) == (kind not in ("qwen", "eos"))
    assert BOS not in ours.encode("a")
    assert BOS not in ours.turn_ids([{"role": "user", "content": "b"}], after=None)
  ours = tokenizer.load(folders["llama3"], chat_template="plain")
  assert ours.encode("<s>a", begins=True).tolist() == [BOS, *ours.encode("a")]


def test_a_template_writes_it_itself_or_not_at_all(folders):
  chat = [{"role": "user", "content": "a"}]
  for template, count in (("{{ bos_token }}{{ messages[0].content }}", 1), ("a", 0)):
    ours = tokenizer.load(folders["llama3"], chat_template=template)
    for ids in (ours.apply_chat_template(chat), ours.prompt(chat, max_tokens=9).ids):
      assert ids.tolist().count(BOS) == count
