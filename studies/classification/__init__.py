"""What probabilities of classes are worth: on usual rows, on shifted rows, and for telling strange ones."""
