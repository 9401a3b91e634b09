"""The algorithm, a file for each section of the contract, each a class with bodies on `self`."""
