"""What everything else is made of: errors, dtypes, tensors, and the operations on them."""
