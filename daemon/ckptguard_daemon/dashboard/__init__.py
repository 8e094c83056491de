"""Behind the page: what the catalogue knows, what a click reads, what happens now, and what an operator has done."""
