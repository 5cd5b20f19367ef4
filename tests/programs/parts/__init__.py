"""What several programs are made of: operators, wrappers, small models and steps."""
