"""The conformance kit: layers to try, a reference written from the contract, one tolerance."""
