"""What a layer of a micro-step does with its rows: physical experts, places, exchange, expert compute."""
