"""What a job pays for besides instances: storage, requests, volumes, transfer. List prices, dated, by region."""
