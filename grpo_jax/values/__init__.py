"""Values of options: what they may be, the nearest valid name, numbers in JSON. Pure."""
