"""Pipeline parallelism under a plain ``training_step``."""
