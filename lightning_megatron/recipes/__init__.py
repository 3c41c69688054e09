"""Recipes: configurations for `lightning-megatron fit`, and modules that some of them name.

They are written to be copied (`lightning-megatron init NAME`) and changed, so the modules import
what a user's own would. A YAML file here is a recipe; `fit --config NAME` finds it by its name.
"""
