// SPDX-License-Identifier: Apache-2.0

package lar

import "time"

// Point is a value of a series of local activation rates. The value may be NaN or infinite.
type Point struct {
	Time  time.Time
	Value float64
}
