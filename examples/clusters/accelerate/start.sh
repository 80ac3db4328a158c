#!/bin/sh
exec ddpdoctor profile --no-tui -- sh nodes.sh
