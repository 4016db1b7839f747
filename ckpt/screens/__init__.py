"""What commands draw with: tables and texts, pages, the terminal that follows a run."""
