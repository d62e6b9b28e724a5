"""Where the time of single steps goes on every rank: recorded, told apart from waiting, drawn and judged."""
