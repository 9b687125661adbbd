"""Pure graders, and the processes in which the dangerous ones run."""
