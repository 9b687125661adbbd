"""Pure graders, and the processes in which the dangerous ones run."""

import warnings

# Of a package that reasoning-gym imports; Python prints it where there is no byte code yet.
warnings.filterwarnings("ignore", category=SyntaxWarning, module=".*cellpylib")
