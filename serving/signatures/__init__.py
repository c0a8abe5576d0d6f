"""What the router knows about experts before it places a request: signatures and regions."""
