"""Where prices come from: a shipped table, recorded files, or the cloud itself. One interface, `PriceSource`."""
