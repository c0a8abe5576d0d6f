"""The serving router: decides, and can say why. See serving/README.md for the rooms."""
