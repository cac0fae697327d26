package calibration

import _ "embed" // the script travels in the binary

// Script is the program that measures. Its own documentation says how to run it.
//
//go:embed calibrate.py
var Script string
