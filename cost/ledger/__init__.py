"""What a job did cost: paid time from events, in classes and causes, at the price of each moment."""
