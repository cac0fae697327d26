// SPDX-License-Identifier: Apache-2.0

package calibration

import _ "embed"

// Script is the Python program that measures. Its docstring describes its use.
//
//go:embed calibrate.py
var Script string
