package lar

import (
	"fmt"
	"math"
)

// Arm holds the sums over requests that their time per token, and its standard error, are computed from.
type Arm struct {
	Requests int64 `json:"requests"`
	// Seconds is from sending a request to the end of its response, Tokens its estimated load: prompt and limit of output.
	Seconds float64 `json:"seconds"`
	Tokens  float64 `json:"tokens"`
	// SecondsSquares, SecondsTokens and TokensSquares are the sums of seconds², seconds x tokens and tokens².
	SecondsSquares float64 `json:"secondsSquares"`
	SecondsTokens  float64 `json:"secondsTokens"`
	TokensSquares  float64 `json:"tokensSquares"`
}

// Add counts a request.
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

// perToken is the time per token, and its standard error by the delta method.
func (a Arm) perToken() (seconds, standardError float64) {
	seconds = a.Seconds / a.Tokens
	return seconds, ratioError(a.Requests, seconds, a.Tokens, a.SecondsSquares, a.SecondsTokens, a.TokensSquares)
}

// CaptureCost compares requests of which the engine was asked for the routed experts with others, on the same pods in the
// same time. Which are asked is a matter of chance, so nothing else tells them apart. What an engine pays for being able to
// tell, whoever asks, is paid by both and does not show.
type CaptureCost struct {
	Asked Arm `json:"asked"`
	Plain Arm `json:"plain"`
}

// Merge adds the requests of another comparison.
func (c *CaptureCost) Merge(other CaptureCost) {
	c.Asked.Merge(other.Asked)
	c.Plain.Merge(other.Plain)
}

// leastArm is the number of requests in either arm from which the cost is told: times have tails, and with fewer requests the
// standard error itself is not to be trusted.
const leastArm = 100

// Ratio is the time per token of the asked requests over that of the others, with its standard error by the delta method.
// It reports false where either are too few.
func (c CaptureCost) Ratio() (ratio, standardError float64, known bool) {
	asked, askedError := c.Asked.perToken()
	plain, plainError := c.Plain.perToken()
	if c.Asked.Requests < leastArm || c.Plain.Requests < leastArm || !(asked > 0) || !(plain > 0) {
		return 0, 0, false
	}
	ratio = asked / plain
	return ratio, ratio * math.Hypot(askedError/asked, plainError/plain), true
}

// normal95 is how many standard errors a 95% interval reaches to either side.
const normal95 = 1.96

// Above reports whether the 95% interval of the ratio, which is symmetric in its logarithm, lies above a bound.
func (c CaptureCost) Above(bound float64) bool {
	ratio, standardError, known := c.Ratio()
	return known && ratio*math.Exp(-normal95*standardError/ratio) > bound
}

// Validate refuses sums that no requests have.
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
