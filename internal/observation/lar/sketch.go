// SPDX-License-Identifier: Apache-2.0

package lar

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
)

const (
	// maxRanks is the maximum number of ranks in a decoded sketch; maxRevisions is the maximum number of sketches in a
	// set.
	maxRanks, maxRevisions = 4096, 1024
)

// Sketch aggregates sampled requests as sums.
type Sketch struct {
	Overall Ratio `json:"overall"`
	// Ranks contains the requests by serving rank, LayerGroups the activations by group of MoE layers (see Count).
	Ranks       []Ratio `json:"ranks,omitempty"`
	LayerGroups []Ratio `json:"layerGroups,omitempty"`
	// Tokens, TokenLayers, RemoteRanks and SavedBytes are sums of the same fields of Count.
	Tokens      int64   `json:"tokens"`
	TokenLayers int64   `json:"tokenLayers"`
	RemoteRanks int64   `json:"remoteRanks"`
	SavedBytes  float64 `json:"savedBytes"`
	// Forecast covers the scored requests.
	Forecast Calibration `json:"forecast"`
}

// Add adds a request. A negative or too large rank is not counted in Ranks.
func (s *Sketch) Add(o Observation) {
	s.Overall.Add(o.Activations)
	if o.Rank >= 0 && o.Rank < maxRanks {
		s.Ranks = atLeast(s.Ranks, o.Rank+1)
		s.Ranks[o.Rank].Add(o.Activations)
	}
	groups := o.LayerGroups[:min(len(o.LayerGroups), maxGroups)]
	s.LayerGroups = atLeast(s.LayerGroups, len(groups))
	for i, group := range groups {
		s.LayerGroups[i].Add(group)
	}
	s.Tokens += int64(o.Tokens)
	s.TokenLayers += o.TokenLayers
	s.RemoteRanks += o.RemoteRanks
	s.SavedBytes += o.SavedBytes
	if o.Forecast != nil {
		s.Forecast.Add(o.Activations, o.Forecast.Predicted)
	}
}

// Merge adds the requests of another sketch.
func (s *Sketch) Merge(other Sketch) {
	s.Overall.Merge(other.Overall)
	s.Ranks = mergeRatios(s.Ranks, other.Ranks)
	s.LayerGroups = mergeRatios(s.LayerGroups, other.LayerGroups)
	s.Tokens += other.Tokens
	s.TokenLayers += other.TokenLayers
	s.RemoteRanks += other.RemoteRanks
	s.SavedBytes += other.SavedBytes
	s.Forecast.Merge(other.Forecast)
}

func mergeRatios(into, from []Ratio) []Ratio {
	into = atLeast(into, len(from))
	for i := range from {
		into[i].Merge(from[i])
	}
	return into
}

// atLeast extends a slice to at least n elements.
func atLeast(ratios []Ratio, n int) []Ratio {
	if missing := n - len(ratios); missing > 0 {
		ratios = append(ratios, make([]Ratio, missing)...)
	}
	return ratios
}

// RemoteRanksPerToken returns the mean number of distinct other ranks that contain experts of a token in a MoE layer;
// NaN without a token.
func (s Sketch) RemoteRanksPerToken() float64 { return float64(s.RemoteRanks) / float64(s.TokenLayers) }

// Validate rejects sums that no requests can have.
func (s Sketch) Validate() error {
	if len(s.Ranks) > maxRanks || len(s.LayerGroups) > maxGroups {
		return fmt.Errorf("%d ranks and %d layer groups: at most %d and %d are allowed", len(s.Ranks), len(s.LayerGroups), maxRanks, maxGroups)
	}
	if s.Tokens < 0 || s.TokenLayers < 0 || s.RemoteRanks < 0 {
		return fmt.Errorf("tokens, tokenLayers and remoteRanks are %d, %d and %d: none can be negative", s.Tokens, s.TokenLayers, s.RemoteRanks)
	}
	if err := finite(map[string]float64{"savedBytes": s.SavedBytes}, false); err != nil {
		return err
	}
	for name, ratios := range map[string][]Ratio{"overall": {s.Overall}, "ranks": s.Ranks, "layerGroups": s.LayerGroups} {
		for i, ratio := range ratios {
			if err := ratio.Validate(); err != nil {
				return fmt.Errorf("%s[%d]: %w", name, i, err)
			}
		}
	}
	if err := s.Forecast.Validate(); err != nil {
		return fmt.Errorf("forecast: %w", err)
	}
	return nil
}

// Key identifies a sketch in a Set.
type Key struct {
	// Revision is the revision of the serving workload. Plan is the full digest of its plan; empty if it has none.
	Revision string `json:"revision"`
	Plan     string `json:"plan,omitempty"`
}

// Set contains one sketch per plan and revision.
type Set map[Key]*Sketch

// Add adds a request.
func (s Set) Add(o Observation) { s.of(Key{o.Revision, o.Plan}).Add(o) }

// Merge adds the requests of another set.
func (s Set) Merge(other Set) {
	for key, sketch := range other {
		s.of(key).Merge(*sketch)
	}
}

func (s Set) of(key Key) *Sketch {
	sketch := s[key]
	if sketch == nil {
		sketch = &Sketch{}
		s[key] = sketch
	}
	return sketch
}

// All returns the sum over plans and revisions.
func (s Set) All() Sketch {
	var all Sketch
	for _, key := range s.keys() {
		all.Merge(*s[key])
	}
	return all
}

// Revision returns the sum over the plans of a revision.
func (s Set) Revision(revision string) Sketch {
	var sum Sketch
	for _, key := range s.keys() {
		if key.Revision == revision {
			sum.Merge(*s[key])
		}
	}
	return sum
}

// keys returns the keys in a fixed order, so that sums and texts do not depend on the order of the map.
func (s Set) keys() []Key {
	keys := make([]Key, 0, len(s))
	for key := range s {
		keys = append(keys, key)
	}
	slices.SortFunc(keys, func(a, b Key) int { return cmp.Or(cmp.Compare(a.Revision, b.Revision), cmp.Compare(a.Plan, b.Plan)) })
	return keys
}

// entry is the JSON form of a sketch in a set.
type entry struct {
	Key
	Sketch
}

// MarshalJSON writes the sketches as a list, ordered by revision and plan.
func (s Set) MarshalJSON() ([]byte, error) {
	entries := make([]entry, 0, len(s))
	for _, key := range s.keys() {
		entries = append(entries, entry{key, *s[key]})
	}
	return json.Marshal(entries)
}

// UnmarshalJSON reads the output of MarshalJSON, and rejects invalid sums.
func (s *Set) UnmarshalJSON(text []byte) error {
	var entries []entry
	if err := json.Unmarshal(text, &entries); err != nil {
		return err
	}
	if len(entries) > maxRevisions {
		return fmt.Errorf("%d sketches: at most %d are allowed", len(entries), maxRevisions)
	}
	set := Set{}
	for _, e := range entries {
		if err := e.Validate(); err != nil {
			return fmt.Errorf("sketch of revision %q and plan %q: %w", e.Revision, e.Plan, err)
		}
		if set[e.Key] != nil {
			return fmt.Errorf("two sketches of revision %q and plan %q", e.Revision, e.Plan)
		}
		set[e.Key] = &e.Sketch
	}
	*s = set
	return nil
}
