"""`make demo`: the product on real input, on one machine, in a few minutes.

prompts      what the clients ask
comparison   the same prompts under naive and vtoken, each in a process of its own
traffic      two replicas under the official openai client, with a live table
summary      what came out, and the last line as JSON
"""
