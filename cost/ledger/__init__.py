"""The ledger of a job: paid time from its events, by class and by cause, at the price of each moment."""
