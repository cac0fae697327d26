// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"encoding/json"
	"math"
	"strings"
	"testing"
)

// measuredOn are times of machines that do as their models say, each time a little slower or faster.
func measuredOn(link Line, grouped GEMM, noise float64) *Calibration {
	c := &Calibration{GPU: "a machine", World: 16}
	sign := noise
	for bytes := 1e6; bytes < 1e9; bytes *= 2 {
		sign = -sign
		c.AllToAll = append(c.AllToAll, MeasuredExchange{Bytes: bytes, Microseconds: link.Microseconds(bytes) * (1 + sign)})
	}
	for tokens := 1.0; tokens <= 4096; tokens *= 2 {
		for _, hidden := range []float64{2048, 7168} {
			sign = -sign
			weights := 16 * hidden * 2 * 1024
			c.Products = append(c.Products, MeasuredProducts{
				Hidden: hidden, Inter: 1024, Experts: 16, TokensPerExpert: tokens, Microseconds: grouped.Microseconds(weights, tokens) * (1 + sign),
			})
		}
	}
	return c
}

var (
	someLink  = Line{Start: 40, PerMicrosecond: 120e3}
	someGEMM  = GEMM{Floor: 1, Start: 12, BytesPerMicrosecond: 1.5e6, FlopsPerMicrosecond: 250e6}
	someNoise = 0.05
)

// A profile with the measurements of other machines has their exchange and products, and all else as before.
func TestWithFindsLinkAndProducts(t *testing.T) {
	base := builtInProfile(t)
	for _, noise := range []float64{0, someNoise} {
		text, err := json.Marshal(measuredOn(someLink, someGEMM, noise))
		if err != nil {
			t.Fatal(err)
		}
		c, err := ParseCalibration(text)
		if err != nil {
			t.Fatal(err)
		}
		p, err := base.With(c)
		if err != nil {
			t.Fatal(err)
		}
		for _, figure := range []struct {
			name      string
			got, want float64
		}{
			{"bandwidth", p.AllToAll.PerMicrosecond, someLink.PerMicrosecond},
			{"rate of reading", p.Grouped.BytesPerMicrosecond, someGEMM.BytesPerMicrosecond},
			{"rate of multiplying", p.Grouped.FlopsPerMicrosecond, someGEMM.FlopsPerMicrosecond},
		} {
			if math.Abs(figure.got/figure.want-1) > 0.01+2*noise {
				t.Errorf("noise %v: %s is %v; measured was %v", noise, figure.name, figure.got, figure.want)
			}
		}
		link, grouped := p.AllToAll.Fit.Error(), p.Grouped.Fit.Error()
		if link < noise/2 || grouped < noise/2 || link > 2*noise+1e-3 || grouped > 2*noise+1e-2 {
			t.Errorf("noise %v: the errors are %v and %v", noise, link, grouped)
		}
		if p.Ranks != 16 || p.Name != "h200-nvlink with measurements of a machine" || p.Attention.PerMicrosecond != base.Attention.PerMicrosecond || base.Ranks != 4 {
			t.Errorf("the profile is %q of %d ranks; that of before has %d", p.Name, p.Ranks, base.Ranks)
		}
	}
	c := measuredOn(someLink, someGEMM, 0)
	c.Products = nil
	p, err := base.With(c)
	if err != nil || p.Grouped.FlopsPerMicrosecond != base.Grouped.FlopsPerMicrosecond {
		t.Errorf("without products: %v, rate of multiplying %v", err, p.Grouped.FlopsPerMicrosecond)
	}
}

// Without residuals the error is that at points that were held out.
func TestErrorOfAFit(t *testing.T) {
	for _, c := range []struct {
		fit  Fit
		want float64
	}{
		{Fit{Residuals: []float64{.3, -.4}, HeldOutMedianError: .1}, math.Sqrt(.125)},
		{Fit{Residuals: []float64{.03, -.04}, HeldOutMedianError: .1}, .1},
		{Fit{HeldOutMedianError: .1}, .1},
	} {
		if got := c.fit.Error(); math.Abs(got-c.want) > 1e-12 {
			t.Errorf("%+v: the error is %v; wanted is %v", c.fit, got, c.want)
		}
	}
}

func TestCalibrationRefuses(t *testing.T) {
	edit := func(change func(c *Calibration)) string {
		c := measuredOn(someLink, someGEMM, 0)
		change(c)
		text, err := json.Marshal(c)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	for want, text := range map[string]string{
		"unexpected end":           "{",
		"all_to_all has 0":         "{}",
		"gate_up_gemm has 2":       edit(func(c *Calibration) { c.Products = c.Products[:2] }),
		"all_to_all[1] takes 0 µs": edit(func(c *Calibration) { c.AllToAll[1].Microseconds = 0 }),
		"gate_up_gemm[3] is":       edit(func(c *Calibration) { c.Products[3].Inter = -1 }),
	} {
		if _, err := ParseCalibration([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("wanted is an error with %q; got %v", want, err)
		}
	}
	falling := measuredOn(someLink, someGEMM, 0)
	for i := range falling.AllToAll {
		falling.AllToAll[i].Microseconds = 80 - float64(i)
	}
	if _, err := builtInProfile(t).With(falling); err == nil || !strings.Contains(err.Error(), "all_to_all: the time does not grow") {
		t.Errorf("exchanges that take less for more bytes gave a profile: %v", err)
	}
}

// TestConstantTimesHaveNoRate checks that equal times result in no rate, regardless of the rounding of their sums.
func TestConstantTimesHaveNoRate(t *testing.T) {
	for us := 1.0; us < 1e5; us *= 1.07 {
		var points []exchanged
		for bytes := 1e3; bytes < 1e9; bytes *= 3.3 {
			points = append(points, exchanged{bytes, us})
		}
		if e, err := fitExchange(points); err == nil || !strings.Contains(err.Error(), "no rate can be fitted") {
			t.Fatalf("%v µs for all sizes: %+v, %v", us, e, err)
		}
		// What rises by a thousandth of itself does have one.
		points[len(points)-1].us *= 1.001
		if l, ok := leastLine(points); !ok {
			t.Fatalf("%v µs, and a thousandth more for the largest size: %+v", us, l)
		}
	}
}
