"""Print a log of requests, the same each time."""

state = 12345
for _ in range(400):
    state = (state * 1103515245 + 12345) % 2**31
    print(f"/{'abcdefgh'[state // 7 % 8]} {(200, 200, 500)[state // 64 % 3]} {state // 1024 % 520}")
