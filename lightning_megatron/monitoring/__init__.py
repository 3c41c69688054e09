"""What a run tells about itself: events, and what is made of them."""
