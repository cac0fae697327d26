// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/placement"
)

// The names of the files of a plan in its directory. MapFile returns the names of the engines' expert maps.
const (
	ManifestFile        = "manifest.json"
	PlacementFile       = "placement.json"
	GatePermutationFile = "gate-permutation.json"
	TablesFile          = "tables.safetensors"
	DriftFile           = "drift.json"
	ScheduleFile        = "schedule.json"
	HardwareFile        = "hardware.json"
	ReportFile          = "report.json"
	// BundleFile and TokenizerFile are next to a plan that package bundle fetched.
	BundleFile    = "bundle.json"
	TokenizerFile = "tokenizer.json"
)

// MaxFileBytes bounds a file of a plan. The tables of the largest known vocabularies with 64 ranks have some tens of
// megabytes per hundred layers.
const MaxFileBytes = 1 << 30

// Bounds of the parts that are parsed as JSON or YAML, which needs up to 100 times their size in memory. The largest
// known models need less than a tenth of these bounds.
const (
	// maxSmallBytes bounds files whose size does not depend on the model: the manifest, the hardware profile and the
	// schedule.
	maxSmallBytes = 1 << 20
	maxTextBytes  = 32 << 20
	// maxDriftBytes bounds drift.json: three matrices of ranks² elements, with at most 1,024 ranks.
	maxDriftBytes = 96 << 20
	// maxHeaderBytes bounds the header of the tables, which have fewer than 30 tensors.
	maxHeaderBytes = 1 << 20
	// maxHiddenLayers and maxMapSlots bound the expert maps of engines, which also contain dense layers: the number of
	// layers, and the number of slots in all layers.
	maxHiddenLayers = 1 << 12
	maxMapSlots     = solver.MaxMapSlots
)

// MaxBytes returns the maximum size of a file of a plan.
func MaxBytes(name string) int64 {
	switch name {
	case ManifestFile, HardwareFile, ScheduleFile:
		return maxSmallBytes
	case DriftFile:
		return maxDriftBytes
	case TablesFile, TokenizerFile, BundleFile, ReportFile:
		return MaxFileBytes
	}
	return maxTextBytes
}

// Format is the version of the files. formatPrefix is the common prefix of all versions.
const (
	Format       = formatPrefix + "1"
	formatPrefix = "semmoe-plan/"
)

// InvalidError is an error in the files of a plan. Reading them again does not help.
type InvalidError struct{ message string }

func (e *InvalidError) Error() string { return e.message }

func invalidf(format string, args ...any) error {
	return &InvalidError{fmt.Sprintf(format, args...)}
}

// IsInvalid reports whether an error in err's tree is an *InvalidError.
func IsInvalid(err error) bool {
	var invalid *InvalidError
	return errors.As(err, &invalid)
}

// Manifest is the content of manifest.json.
type Manifest struct {
	Format    string              `json:"format"`
	Attention placement.Attention `json:"attention"`
	Forecast  solver.Forecast     `json:"forecast"`
	Algorithm placement.Algorithm `json:"algorithm"`
	// Objective and RanksPerNode are the objective of the scores in the tables, absent for activations. RankCapacity
	// contains the shares of the ranks in the tokens, absent if all ranks have equal shares.
	Objective    placement.Objective `json:"objective,omitempty"`
	RanksPerNode int                 `json:"ranks_per_node,omitempty"`
	RankCapacity []float64           `json:"rank_capacity,omitempty"`
	HiddenLayers int                 `json:"hidden_layers"`
	Vocabulary   int                 `json:"vocab_size"`
	// TopK, HiddenSize and ActiveParameters determine the cost of a token. They are absent if the trace does not
	// contain them.
	TopK             int    `json:"experts_per_token,omitempty"`
	HiddenSize       int    `json:"hidden_size,omitempty"`
	ActiveParameters int64  `json:"active_parameters,omitempty"`
	TrainPercent     int    `json:"train_percent"`
	Seed             uint64 `json:"seed"`
	// TraceDigest is the sha256 of the uncompressed trace.
	TraceDigest string `json:"trace_digest"`
	// ModelDigest identifies the checkpoint of the plan. It is absent if the trace does not contain it.
	ModelDigest string `json:"model_digest,omitempty"`
	// LayoutDigest is the sha256 of placement.json.
	LayoutDigest string `json:"layout_digest"`
	// Layout is the digest of the plan whose placement this plan uses. The tables may be used with pods of that plan.
	// It is absent if the placement was solved for this plan.
	Layout string `json:"layout,omitempty"`
	// Front contains the placements that a search by time compared, and Chosen is the name of the chosen one. They are
	// absent with other objectives.
	Front  []solver.FrontPoint `json:"front,omitempty"`
	Chosen string              `json:"chosen,omitempty"`
	// Copies records how the number of redundant slots was chosen from the memory. It is absent if the number was
	// given.
	Copies *solver.Copies `json:"copies,omitempty"`
	// Files contains the sha256 of every file except manifest.json and report.json.
	Files map[string]string `json:"files"`
}

// maxFront bounds the number of recorded placements that a plan was chosen from.
const maxFront = 64

// Artifact is an encoded plan.
type Artifact struct {
	Manifest Manifest
	// Files contains the content of every file except report.json, including manifest.json.
	Files map[string][]byte
	// Digest is the plan digest in hexadecimal.
	Digest string
}

// Encode returns the files of a plan.
func Encode(p *solver.Plan) (*Artifact, error) {
	if err := validate(p); err != nil {
		return nil, err
	}
	files := map[string][]byte{}
	var err error
	if files[PlacementFile], err = encodeJSON(p.Placement); err != nil {
		return nil, err
	}
	layout := digest(files[PlacementFile])
	if files[TablesFile], err = encodeTables(p, layout); err != nil {
		return nil, err
	}
	if p.Drift != nil {
		if files[DriftFile], err = encodeJSON(p.Drift); err != nil {
			return nil, err
		}
	}
	if p.Schedule != nil {
		if files[ScheduleFile], err = encodeJSON(p.Schedule); err != nil {
			return nil, err
		}
	}
	if !p.Hardware.IsDefault() {
		if files[HardwareFile], err = encodeJSON(p.Hardware); err != nil {
			return nil, err
		}
	}
	if err := addEngineFiles(files, p); err != nil {
		return nil, err
	}
	a := &Artifact{Files: files, Manifest: Manifest{
		Format: Format, Attention: p.Attention, Forecast: p.Forecast, Algorithm: p.Algorithm, RankCapacity: p.RankCapacity,
		HiddenLayers: p.HiddenLayers, Vocabulary: p.Vocabulary, TrainPercent: p.TrainPercent, Seed: p.Seed,
		TopK: p.Shape.TopK, HiddenSize: p.Shape.HiddenSize, ActiveParameters: p.Shape.ActiveParameters,
		TraceDigest: hex.EncodeToString(p.TraceDigest[:]), ModelDigest: p.ModelDigest, LayoutDigest: layout, Layout: p.Layout, Front: p.Front, Chosen: p.Chosen, Copies: p.Copies, Files: map[string]string{},
	}}
	if namesObjective(p) {
		a.Manifest.Objective, a.Manifest.RanksPerNode = p.Objective, p.RanksPerNode
	}
	for name, content := range files {
		a.Manifest.Files[name] = digest(content)
	}
	if files[ManifestFile], err = encodeJSON(a.Manifest); err != nil {
		return nil, err
	}
	a.Digest = digest(files[ManifestFile])
	return a, nil
}

// validate checks that the parts of a plan are consistent.
func validate(p *solver.Plan) error {
	if err := p.Placement.Validate(); err != nil {
		return invalidf("%s: %v", PlacementFile, err)
	}
	if err := checkSlots(p.Placement, p.HiddenLayers); err != nil {
		return err
	}
	last := p.Placement.Layers[len(p.Placement.Layers)-1].Layer
	switch {
	case p.HiddenLayers <= last:
		return invalidf("hidden_layers is %d; %s places layer %d", p.HiddenLayers, PlacementFile, last)
	case p.Shape.TopK < 0 || p.Shape.HiddenSize < 0 || p.Shape.ActiveParameters < 0:
		return invalidf("experts_per_token, hidden_size and active_parameters are %d, %d and %d; they must be at least 0",
			p.Shape.TopK, p.Shape.HiddenSize, p.Shape.ActiveParameters)
	case p.Vocabulary < 1:
		return invalidf("vocab_size is %d; it must be at least 1", p.Vocabulary)
	case p.TrainPercent < 1 || p.TrainPercent > 99:
		return invalidf("train_percent is %d; allowed is 1 to 99", p.TrainPercent)
	case p.Layout != "" && !isDigest(p.Layout):
		return invalidf("layout is %q; it must be the digest of a plan, 64 hexadecimal digits in lower case", p.Layout)
	}
	if namesObjective(p) {
		if err := placement.CheckObjective(p.Objective, p.Placement.Ranks, p.RanksPerNode); err != nil {
			return invalidf("%v", err)
		}
	}
	if len(p.Front) > maxFront {
		return invalidf("front has %d placements; the maximum is %d", len(p.Front), maxFront)
	}
	if c := p.Copies; c != nil && (len(c.Points) > maxFront || c.Chosen != p.Placement.SlotsPerRank-p.Placement.Experts/p.Placement.Ranks) {
		return invalidf("copies has %d redundant slots per rank and %d compared numbers; %s has %d slots, and at most %d numbers are allowed",
			c.Chosen, len(c.Points), PlacementFile, p.Placement.SlotsPerRank-p.Placement.Experts/p.Placement.Ranks, maxFront)
	}
	if err := placement.CheckCapacity(p.RankCapacity, p.Placement.Ranks); err != nil {
		return invalidf("rank_capacity: %v", err)
	}
	if _, err := solver.ParseForecast(string(p.Forecast)); err != nil {
		return invalidf("%v", err)
	}
	if _, err := placement.ParseAlgorithm(string(p.Algorithm)); err != nil {
		return invalidf("%v", err)
	}
	if p.Attention == placement.DataParallel && p.Forecast != solver.Table {
		return invalidf("forecast %s is for attention %s", p.Forecast, placement.TensorParallel)
	}
	if err := validateTables(p); err != nil {
		return err
	}
	return validateFiles(p)
}

// checkSlots checks the bounds of the expert maps of a placement.
func checkSlots(p *placement.Placement, hiddenLayers int) error {
	if hiddenLayers > maxHiddenLayers {
		return invalidf("hidden_layers is %d; allowed is up to %d", hiddenLayers, maxHiddenLayers)
	}
	if slots := p.Ranks * p.SlotsPerRank; hiddenLayers*slots > maxMapSlots {
		return invalidf("hidden_layers is %d, with %d slots; allowed are up to %d slots in all layers", hiddenLayers, slots, maxMapSlots)
	}
	return nil
}

// validateTables checks each table, and that the plan contains exactly the tables of its attention and forecast.
func validateTables(p *solver.Plan) error {
	if (p.Context != nil) != p.Forecast.Contextual() || (p.LookAhead != nil) != (p.Forecast == solver.LookAhead) || (p.LookBack != nil) != (p.Forecast == solver.LookBack) {
		return invalidf("%s must contain exactly the tables of forecast %s", TablesFile, p.Forecast)
	}
	if p.Context != nil {
		if err := p.Context.Validate(p.Tokens); err != nil {
			return invalidf("%s: %v", TablesFile, err)
		}
	}
	if p.LookAhead != nil {
		if err := p.LookAhead.Validate(); err != nil {
			return invalidf("%s: %v", TablesFile, err)
		}
	}
	if p.LookBack != nil {
		if err := p.LookBack.Validate(); err != nil {
			return invalidf("%s: %v", TablesFile, err)
		}
	}
	switch {
	case p.Attention == placement.DataParallel && p.Ranks != nil && p.Tokens == nil:
		return nil
	case p.Attention == placement.TensorParallel && p.Tokens != nil && p.Ranks == nil:
		return nil
	case p.Attention == placement.DataParallel || p.Attention == placement.TensorParallel:
		return invalidf("%s must contain exactly the tables of attention %s", TablesFile, p.Attention)
	}
	return invalidf("attention is %q; allowed is dp, tp", p.Attention)
}

// validateFiles checks the optional parts of a plan that have separate files.
func validateFiles(p *solver.Plan) error {
	if p.Drift != nil {
		if err := checkDrift(p); err != nil {
			return invalidf("%s: %v", DriftFile, err)
		}
	}
	if p.Schedule != nil {
		if err := p.Schedule.Check(p.Placement.Ranks); err != nil {
			return invalidf("%s: %v", ScheduleFile, err)
		}
	}
	if p.Hardware != nil {
		if err := p.Hardware.Check(); err != nil {
			return invalidf("%s: %v", HardwareFile, err)
		}
	}
	return nil
}

// checkDrift checks that the calibration has the number of ranks that requests of the plan have.
func checkDrift(p *solver.Plan) error {
	ranks := 1
	if p.Attention == placement.DataParallel {
		ranks = p.Placement.Ranks
	}
	if p.Drift.Ranks != ranks {
		return fmt.Errorf("ranks is %d; requests of this plan have %d", p.Drift.Ranks, ranks)
	}
	return p.Drift.Validate()
}

// namesObjective reports whether the manifest contains the objective. It is omitted for activations.
func namesObjective(p *solver.Plan) bool {
	return p.Objective != "" && p.Objective != placement.Activation
}

// isDigest reports whether text is a sha256 in the form that digest returns.
func isDigest(text string) bool {
	sum, err := hex.DecodeString(text)
	return err == nil && len(sum) == sha256.Size && hex.EncodeToString(sum) == text
}

// OnLayoutOf turns a plan into new tables for the placement of current, which pods may be serving. The placements must
// be byte-for-byte equal. Layout is always set to the plan that the placement was solved for.
func OnLayoutOf(p *solver.Plan, current *Artifact) error {
	text, err := encodeJSON(p.Placement)
	if err != nil {
		return err
	}
	if !bytes.Equal(text, current.Files[PlacementFile]) {
		return invalidf("%s of the new tables differs from that of plan %s", PlacementFile, current.Digest)
	}
	p.Layout = cmp.Or(current.Manifest.Layout, current.Digest)
	return nil
}

func digest(content []byte) string {
	sum := sha256.Sum256(content)
	return hex.EncodeToString(sum[:])
}

// encodeJSON returns JSON that ends in a line feed, like a text file.
func encodeJSON(v any) ([]byte, error) {
	text, err := json.Marshal(v)
	return append(text, '\n'), err
}
