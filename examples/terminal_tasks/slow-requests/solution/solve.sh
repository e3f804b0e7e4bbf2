#!/bin/bash
cd /app
while read -r path status took; do
  [ "$status" = 200 ] && [ "$took" -gt 500 ] && echo "$path"
done < requests.log | sort -u > slow.txt
