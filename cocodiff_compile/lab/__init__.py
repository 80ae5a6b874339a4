"""Small models and local ranks to run things on, and the demo."""
