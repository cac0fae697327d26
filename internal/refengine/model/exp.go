// SPDX-License-Identifier: Apache-2.0

package model

import "math"

// The range in which the result of Exp is a normal float32.
const (
	minExponent = -87.33654
	maxExponent = 88.37
)

// Exp returns e^x with a relative error below 2e-7, in half the time of math.Exp. It is 0 below minExponent and
// infinite above maxExponent. Products are rounded before they are added, so that the result is equal on all platforms.
//
// x is n*ln(2) + r with an integer n and |r| <= ln(2)/2, so that e^x is 2^n * e^r. The polynomial of e^r is that of
// expf in the Cephes library.
func Exp(x float32) float32 {
	if x < minExponent {
		return 0
	}
	if x > maxExponent {
		return float32(math.Inf(1))
	}
	// Adding 1.5*2^23 rounds to an integer, which is then in the low bits.
	const integer = 3 << 22
	shifted := float32(x*math.Log2E) + integer
	n := shifted - integer
	// ln(2) is the sum of two constants. The product of n and the first one is exact.
	r := x - float32(n*0.693359375)
	r -= float32(n * -2.12194440e-4)
	p := float32(1.9875691500e-4*r) + 1.3981999507e-3
	p = float32(p*r) + 8.3334519073e-3
	p = float32(p*r) + 4.1665795894e-2
	p = float32(p*r) + 1.6666665459e-1
	p = float32(p*r) + 5.0000001201e-1
	p = float32(float32(p*r)*r) + r + 1
	return p * math.Float32frombits((math.Float32bits(shifted)+127)<<23)
}
