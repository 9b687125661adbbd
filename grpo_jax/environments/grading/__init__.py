"""Pure graders, and the processes in which the dangerous ones run."""

import warnings

# reasoning-gym imports this package; Python prints it when it compiles it to byte code.
warnings.filterwarnings("ignore", category=SyntaxWarning, module=".*cellpylib")
