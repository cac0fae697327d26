// SPDX-License-Identifier: Apache-2.0

package lar

import "fmt"

// CovariateCount is the number of covariates of a request.
const CovariateCount = 3

// Covariates are the quantities that the times of a request depend on under any plan: the prompt tokens, estimated from
// the prompt's length, the output tokens, and the number of requests that the router had in flight at the pod when it
// sent the request. All revisions use the same measure: a token count by a plan's tokenizer would differ from an
// estimate.
type Covariates [CovariateCount]float64

// maxCovariate limits a covariate, so that sums of squares are exact enough to subtract their mean.
const maxCovariate = 1e7

// CovariateSums are the sums for a linear regression of a value on the covariates. The name of the field in reports
// identifies the covariates: other covariates need another field.
type CovariateSums struct {
	// N is the number of requests, at most that of the Moments.
	N int64 `json:"n"`
	// X are the sums of the covariates, XX the sums of their products in the order 00, 01, 02, 11, 12, 22, and XY the
	// sums of their products with the value.
	X  [CovariateCount]float64                            `json:"x"`
	XX [CovariateCount * (CovariateCount + 1) / 2]float64 `json:"xx"`
	XY [CovariateCount]float64                            `json:"xy"`
}

func (c *CovariateSums) add(value float64, x Covariates) {
	c.N++
	at := 0
	for i := range x {
		x[i] = min(max(x[i], 0), maxCovariate)
	}
	for i := range x {
		c.X[i] += x[i]
		c.XY[i] += x[i] * value
		for j := i; j < CovariateCount; j++ {
			c.XX[at] += x[i] * x[j]
			at++
		}
	}
}

func (c *CovariateSums) merge(other *CovariateSums) {
	c.N += other.N
	for i := range c.X {
		c.X[i] += other.X[i]
		c.XY[i] += other.XY[i]
	}
	for i := range c.XX {
		c.XX[i] += other.XX[i]
	}
}

// Product returns the sum of the products of two covariates.
func (c *CovariateSums) Product(i, j int) float64 {
	i, j = min(i, j), max(i, j)
	return c.XX[i*CovariateCount-i*(i+1)/2+j]
}

// validate rejects sums that no requests can have: by the Cauchy-Schwarz inequality, the sums of squares limit all
// others.
func (c *CovariateSums) validate(of Moments) error {
	if c.N < 0 || c.N > of.N {
		return fmt.Errorf("n is %d of %d requests: want 0 to as many as there are", c.N, of.N)
	}
	const rounding = 1 + 1e-6
	for i := range c.X {
		square := c.Product(i, i)
		if err := finite(map[string]float64{"x": c.X[i], "xy": c.XY[i], "xx": square}, true); err != nil {
			return err
		}
		if c.X[i]*c.X[i] > rounding*float64(c.N)*square || c.XY[i]*c.XY[i] > rounding*square*of.SumSquares {
			return fmt.Errorf("x[%d] is %v and xy[%d] %v over %d requests with a sum of squares of %v: no requests have such sums",
				i, c.X[i], i, c.XY[i], c.N, square)
		}
		for j := range i {
			product := c.Product(i, j)
			if err := finite(map[string]float64{"xx": product}, true); err != nil {
				return err
			}
			if product*product > rounding*square*c.Product(j, j) {
				return fmt.Errorf("xx has %v for x[%d] and x[%d], more than their squares allow", product, j, i)
			}
		}
	}
	return nil
}
