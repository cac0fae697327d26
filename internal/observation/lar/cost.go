// SPDX-License-Identifier: Apache-2.0

package lar

import (
	"fmt"
	"math"
)

// Arm contains the sums over requests from which their time per token and its standard error are computed.
type Arm struct {
	Requests int64 `json:"requests"`
	// Seconds is the time from sending a request to the end of its response. Tokens is the estimated load: prompt plus
	// output limit.
	Seconds float64 `json:"seconds"`
	Tokens  float64 `json:"tokens"`
	// SecondsSquares, SecondsTokens and TokensSquares are the sums of seconds², seconds x tokens and tokens².
	SecondsSquares float64 `json:"secondsSquares"`
	SecondsTokens  float64 `json:"secondsTokens"`
	TokensSquares  float64 `json:"tokensSquares"`
}

// Add adds a request.
func (a *Arm) Add(seconds, tokens float64) {
	a.Merge(Arm{1, seconds, tokens, seconds * seconds, seconds * tokens, tokens * tokens})
}

// Merge adds the requests of another arm.
func (a *Arm) Merge(other Arm) {
	a.Requests += other.Requests
	a.Seconds += other.Seconds
	a.Tokens += other.Tokens
	a.SecondsSquares += other.SecondsSquares
	a.SecondsTokens += other.SecondsTokens
	a.TokensSquares += other.TokensSquares
}

// perToken returns the time per token, with its standard error by the delta method.
func (a Arm) perToken() (seconds, standardError float64) {
	seconds = a.Seconds / a.Tokens
	return seconds, ratioError(a.Requests, seconds, a.Tokens, a.SecondsSquares, a.SecondsTokens, a.TokensSquares)
}

// CaptureCost compares requests for which the router requested the routed experts with other requests, on the same pods
// at the same time. The assignment is random, so there is no other systematic difference. The cost of enabling the
// capture in an engine applies to both arms, and is not included.
type CaptureCost struct {
	Asked Arm `json:"asked"`
	Plain Arm `json:"plain"`
}

// Merge adds the requests of another comparison.
func (c *CaptureCost) Merge(other CaptureCost) {
	c.Asked.Merge(other.Asked)
	c.Plain.Merge(other.Plain)
}

// minArmRequests is the minimum number of requests per arm for reporting the cost: times have heavy tails, and with
// fewer requests the standard error itself is unreliable.
const minArmRequests = 100

// Ratio returns the time per token of the captured requests over that of the others, with its standard error by the
// delta method. It returns false if either arm has too few requests.
func (c CaptureCost) Ratio() (ratio, standardError float64, known bool) {
	asked, askedError := c.Asked.perToken()
	plain, plainError := c.Plain.perToken()
	if c.Asked.Requests < minArmRequests || c.Plain.Requests < minArmRequests || !(asked > 0) || !(plain > 0) {
		return 0, 0, false
	}
	ratio = asked / plain
	return ratio, ratio * math.Hypot(askedError/asked, plainError/plain), true
}

// normal95 is the half-width of a 95% interval, in standard errors.
const normal95 = 1.96

// Above reports whether the 95% interval of the ratio, symmetric in its logarithm, is above a bound.
func (c CaptureCost) Above(bound float64) bool {
	ratio, standardError, known := c.Ratio()
	return known && ratio*math.Exp(-normal95*standardError/ratio) > bound
}

// Validate rejects sums that no requests can have.
func (c CaptureCost) Validate() error {
	for name, arm := range map[string]Arm{"asked": c.Asked, "plain": c.Plain} {
		if arm.Requests < 0 {
			return fmt.Errorf("%s: requests are %d: they cannot be negative", name, arm.Requests)
		}
		sums := map[string]float64{
			"seconds": arm.Seconds, "tokens": arm.Tokens,
			"secondsSquares": arm.SecondsSquares, "secondsTokens": arm.SecondsTokens, "tokensSquares": arm.TokensSquares,
		}
		if err := finite(sums, true); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}
