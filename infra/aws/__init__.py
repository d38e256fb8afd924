"""An AWS account: how it is asked, what it has, and what is made there."""
