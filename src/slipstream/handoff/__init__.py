"""Pages and states move between engines. Between two GPUs or two machines it never ran."""
