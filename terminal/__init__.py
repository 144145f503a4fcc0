"""What commands are made of: options, printed and drawn results, and the program that runs them."""
