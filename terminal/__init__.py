"""Building blocks of commands: options, printed and drawn results, and the function that runs a program."""
