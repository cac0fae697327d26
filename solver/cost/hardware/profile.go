// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"bytes"
	"embed"
	"encoding/json"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"sync"
)

// format is the value of a profile's format member.
const format = "semmoe.io/hardware-profile/v1"

// Profile contains the time models of machines.
type Profile struct {
	Format string `json:"format"`
	// Name is the name of the profile. GPU and Ranks describe the measured machines.
	Name  string `json:"name"`
	GPU   string `json:"gpu"`
	Ranks int    `json:"ranks"`
	// MemoryBytes is the memory of a rank.
	MemoryBytes float64 `json:"memory_bytes"`
	// Grouped is one kernel for all experts of a rank, Dense one kernel for each; both in bf16.
	Grouped   GEMM      `json:"grouped_gemm"`
	Dense     GEMM      `json:"dense_gemm"`
	Attention Attention `json:"attention"`
	// AllToAll, and A2E between groups of ranks, are functions of the bytes that the busiest rank sends or receives.
	// The others are functions of the buffer size.
	AllToAll      Exchange    `json:"all_to_all"`
	AllReduce     Exchange    `json:"all_reduce"`
	ReduceScatter Exchange    `json:"reduce_scatter"`
	AllGather     Exchange    `json:"all_gather"`
	A2E           []Bipartite `json:"a2e,omitempty"`
	// Products are the measured products, which decide between grouped and dense kernels.
	Products []MeasuredProducts `json:"products"`
}

// GEMM models a kernel with a minimum time (floor). Above it, the time is a start-up time plus the maximum of the times
// to read the weights and to multiply (roofline model).
type GEMM struct {
	Floor               float64 `json:"floor_us"`
	Start               float64 `json:"start_us"`
	BytesPerMicrosecond float64 `json:"bytes_per_us"`
	FlopsPerMicrosecond float64 `json:"flops_per_us"`
	Fit                 Fit     `json:"fit"`
}

// Microseconds returns the time of a kernel that reads the given number of weights and multiplies each with the given
// number of rows, in bf16.
func (g GEMM) Microseconds(weights, rows float64) float64 {
	const bf16, multiplyAndAdd = 2, 2
	return max(g.Floor, g.Start+max(weights*bf16/g.BytesPerMicrosecond, weights*rows*multiplyAndAdd/g.FlopsPerMicrosecond))
}

// Block returns the time of a gated feed-forward block: gate and up projection in one kernel, the down projection in
// another. weights is the number of weights of one of the three matrices.
func (g GEMM) Block(weights, rows float64) float64 {
	return g.Microseconds(2*weights, rows) + g.Microseconds(weights, rows)
}

// Fit describes how well a model fits its measurements. Errors are relative: modelled/measured − 1.
type Fit struct {
	Points int `json:"points"`
	// R2 is the fraction of the variance of the times that the model explains.
	R2 float64 `json:"r2"`
	// MedianError and MaxError are errors on the fitted measurements. The others are errors on held-out measurements,
	// by five-fold cross-validation.
	MedianError        float64 `json:"median_error"`
	MaxError           float64 `json:"max_error"`
	HeldOutMedianError float64 `json:"held_out_median_error"`
	HeldOutMaxError    float64 `json:"held_out_max_error"`
	// Residuals are in the order of the measurements.
	Residuals []float64 `json:"residuals"`
}

// Error returns the expected relative error of a time: the root mean square of the residuals, but at least the held-out
// error. Profiles without residuals only have the latter.
func (f *Fit) Error() float64 {
	sum := 0.0
	for _, r := range f.Residuals {
		sum += r * r / float64(len(f.Residuals))
	}
	return max(math.Sqrt(sum), f.HeldOutMedianError)
}

// Parse reads a profile, and returns an error for values that no measurements produce.
func Parse(text []byte) (*Profile, error) {
	p := &Profile{}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(p); err != nil {
		return nil, err
	}
	return p, p.Check()
}

// Check returns an error for the first invalid member.
func (p *Profile) Check() error {
	switch {
	case p.Format != format:
		return fmt.Errorf("format is %q; it must be %q", p.Format, format)
	case p.Name == "":
		return fmt.Errorf("name is missing")
	case p.Ranks < 2:
		return fmt.Errorf("ranks is %d; it must be at least 2", p.Ranks)
	case !above(p.MemoryBytes):
		return fmt.Errorf("memory_bytes is %v; it must be above 0", p.MemoryBytes)
	}
	if missing := p.missing(); len(missing) > 0 {
		return fmt.Errorf("measurements are missing: %s; without them times cannot be modelled: make the profile with semmoe calibrate, or with semmoe-lab fit", strings.Join(missing, ", "))
	}
	if err := p.Attention.check(); err != nil {
		return fmt.Errorf("attention: %w", err)
	}
	if err := p.checkExchanges(); err != nil {
		return err
	}
	for name, g := range map[string]GEMM{"grouped_gemm": p.Grouped, "dense_gemm": p.Dense} {
		if !atLeastZero(g.Floor) || !atLeastZero(g.Start) || !above(g.BytesPerMicrosecond) || !above(g.FlopsPerMicrosecond) {
			return fmt.Errorf("%s: floor_us is %v, start_us %v, bytes_per_us %v, flops_per_us %v; the first two must be at least 0, the others above 0",
				name, g.Floor, g.Start, g.BytesPerMicrosecond, g.FlopsPerMicrosecond)
		}
	}
	for i, m := range p.Products {
		if !above(m.Hidden) || !above(m.Inter) || !above(m.Experts) || !above(m.TokensPerExpert) || !above(m.Microseconds) || !above(m.Dense) {
			return fmt.Errorf("products[%d] is %+v; all must be above 0", i, m)
		}
	}
	return nil
}

// missing returns the names of required members that the profile lacks.
func (p *Profile) missing() (names []string) {
	for _, of := range []struct {
		name   string
		member any
	}{
		{"attention", p.Attention}, {"all_to_all", p.AllToAll}, {"all_reduce", p.AllReduce}, {"reduce_scatter", p.ReduceScatter}, {"all_gather", p.AllGather},
		{"grouped_gemm", p.Grouped}, {"dense_gemm", p.Dense},
	} {
		if reflect.ValueOf(of.member).IsZero() {
			names = append(names, of.name)
		}
	}
	return names
}

func (p *Profile) checkExchanges() error {
	for _, of := range []struct {
		name     string
		exchange *Exchange
	}{
		{"all_to_all", &p.AllToAll}, {"all_reduce", &p.AllReduce}, {"reduce_scatter", &p.ReduceScatter}, {"all_gather", &p.AllGather},
	} {
		if err := of.exchange.Check(); err != nil {
			return fmt.Errorf("%s: %w", of.name, err)
		}
	}
	for i := range p.A2E {
		b := &p.A2E[i]
		if b.AttentionRanks < 1 || b.ExpertRanks < 1 {
			return fmt.Errorf("a2e[%d] is between %d and %d ranks; both must be at least 1", i, b.AttentionRanks, b.ExpertRanks)
		}
		if err := b.Exchange.Check(); err != nil {
			return fmt.Errorf("a2e[%d].line: %w", i, err)
		}
	}
	return nil
}

func above(v float64) bool { return v > 0 && !math.IsInf(v, 0) }

func atLeastZero(v float64) bool { return v >= 0 && !math.IsInf(v, 0) }

// builtIn contains profiles of measured machines, written by semmoe-lab fit.
//
//go:embed profiles/*.json
var builtIn embed.FS

//go:generate go run ../../../cmd/semmoe-lab fit --measurements testdata/h200x4.json --name h200-nvlink --memory-gib 141 --out profiles/h200-nvlink.json

// Default is the name of the default profile.
const Default = "h200-nvlink"

// Names returns the names of the built-in profiles, sorted.
func Names() []string {
	entries, err := builtIn.ReadDir("profiles")
	if err != nil {
		panic(err) // it is embedded
	}
	var names []string
	for _, entry := range entries {
		names = append(names, strings.TrimSuffix(entry.Name(), ".json"))
	}
	return names
}

// BuiltIn returns the built-in profile with the given name.
func BuiltIn(name string) (*Profile, error) {
	if !slices.Contains(Names(), name) {
		return nil, fmt.Errorf("there is no built-in hardware profile %q; there are %s", name, strings.Join(Names(), ", "))
	}
	text, err := builtIn.ReadFile("profiles/" + name + ".json")
	if err != nil {
		return nil, err
	}
	return Parse(text)
}

// IsDefault reports whether a profile equals DefaultProfile, or is nil.
func (p *Profile) IsDefault() bool { return p == nil || reflect.DeepEqual(p, DefaultProfile()) }

// DefaultProfile returns the profile named Default. The result is shared and must not be modified.
func DefaultProfile() *Profile { return defaultProfile() }

var defaultProfile = sync.OnceValue(func() *Profile {
	p, err := BuiltIn(Default)
	if err != nil {
		panic(err) // it is embedded
	}
	return p
})
