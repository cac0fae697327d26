// SPDX-License-Identifier: Apache-2.0

package model

import (
	"math"
	"testing"
)

// TestExp compares Exp with math.Exp in its range and at its limits.
func TestExp(t *testing.T) {
	for x := float32(minExponent); x <= maxExponent; x += 0.00137 {
		want := math.Exp(float64(x))
		if got := float64(Exp(x)); math.Abs(got-want) > 2e-7*want {
			t.Fatalf("Exp(%v) is %v, want %v", x, got, want)
		}
	}
	infinity := float32(math.Inf(1))
	for _, test := range []struct{ x, want float32 }{
		{0, 1}, {float32(math.Copysign(0, -1)), 1}, {-90, 0}, {90, infinity}, {-infinity, 0}, {infinity, infinity}, {-math.MaxFloat32, 0},
	} {
		if got := Exp(test.x); got != test.want {
			t.Errorf("Exp(%v) is %v, want %v", test.x, got, test.want)
		}
	}
	if got := Exp(float32(math.NaN())); !math.IsNaN(float64(got)) {
		t.Errorf("Exp(NaN) is %v, want NaN", got)
	}
}

func BenchmarkExp(b *testing.B) {
	xs := make([]float32, 1024)
	for i := range xs {
		xs[i] = float32(i)/64 - 12
	}
	b.Run("Exp", func(b *testing.B) {
		for b.Loop() {
			var sum float32
			for _, x := range xs {
				sum += Exp(x)
			}
			sink = sum
		}
	})
	b.Run("math", func(b *testing.B) {
		for b.Loop() {
			var sum float32
			for _, x := range xs {
				sum += float32(math.Exp(float64(x)))
			}
			sink = sum
		}
	})
}

var sink float32
