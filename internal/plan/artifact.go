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

// The files of a plan, by their names in its directory; MapFile names the engines' expert maps.
const (
	ManifestFile        = "manifest.json"
	PlacementFile       = "placement.json"
	GatePermutationFile = "gate-permutation.json"
	TablesFile          = "tables.safetensors"
	DriftFile           = "drift.json"
	ScheduleFile        = "schedule.json"
	HardwareFile        = "hardware.json"
	ReportFile          = "report.json"
	// BundleFile and TokenizerFile lie beside a plan that package bundle has fetched.
	BundleFile    = "bundle.json"
	TokenizerFile = "tokenizer.json"
)

// MaxFileBytes bounds a file of a plan. Tables of the largest known vocabularies and 64 ranks have some tens of megabytes for each hundred
// layers.
const MaxFileBytes = 1 << 30

// Bounds of the parts that are parsed as JSON or YAML, which need up to 100 times their size in memory. The largest known models have less
// than a tenth of them.
const (
	// maxSmallBytes is for files whose size does not follow from the model: the manifest, the profile of the machines and the schedule.
	maxSmallBytes = 1 << 20
	maxTextBytes  = 32 << 20
	// maxDriftBytes is for three matrices of ranks², which have 1,024 ranks at most.
	maxDriftBytes = 96 << 20
	// maxHeaderBytes bounds the header of the tables, which have less than 30 tensors.
	maxHeaderBytes = 1 << 20
	// maxHiddenLayers and maxMapSlots bound the engines' maps, which have dense layers as well: the layers, and the slots of all layers.
	maxHiddenLayers = 1 << 12
	maxMapSlots     = solver.MaxMapSlots
)

// MaxBytes returns the bound of a file of a plan.
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

// Format is the version of the files; formatPrefix is what those of all versions begin with.
const (
	Format       = formatPrefix + "1"
	formatPrefix = "semmoe-plan/"
)

// InvalidError is a fault of a plan's files: reading them again cannot help.
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
	// Objective and RanksPerNode are what the tables score by, absent where that is activations. RankCapacity are the ranks'
	// shares of the tokens, absent where they are equal.
	Objective    placement.Objective `json:"objective,omitempty"`
	RanksPerNode int                 `json:"ranks_per_node,omitempty"`
	RankCapacity []float64           `json:"rank_capacity,omitempty"`
	HiddenLayers int                 `json:"hidden_layers"`
	Vocabulary   int                 `json:"vocab_size"`
	// TopK, HiddenSize and ActiveParameters are what a token costs by, absent where the trace did not tell.
	TopK             int    `json:"experts_per_token,omitempty"`
	HiddenSize       int    `json:"hidden_size,omitempty"`
	ActiveParameters int64  `json:"active_parameters,omitempty"`
	TrainPercent     int    `json:"train_percent"`
	Seed             uint64 `json:"seed"`
	// TraceDigest is the sha256 of the uncompressed trace.
	TraceDigest string `json:"trace_digest"`
	// ModelDigest identifies the checkpoint that the plan is for; absent where the trace did not tell.
	ModelDigest string `json:"model_digest,omitempty"`
	// LayoutDigest is the sha256 of placement.json.
	LayoutDigest string `json:"layout_digest"`
	// Layout is the digest of the plan whose placement this is, absent where the placement was solved for this plan: the tables
	// may be used with pods of that plan.
	Layout string `json:"layout,omitempty"`
	// Front are the placements that a search by time chose among, Chosen is the name of the plan's; absent with other objectives.
	Front  []solver.FrontPoint `json:"front,omitempty"`
	Chosen string              `json:"chosen,omitempty"`
	// Copies is how the number of redundant slots was chosen from memory; absent where it was given.
	Copies *solver.Copies `json:"copies,omitempty"`
	// Files holds the sha256 of every file but manifest.json and report.json.
	Files map[string]string `json:"files"`
}

// maxFront bounds the recorded placements that a plan was chosen from.
const maxFront = 64

// Artifact is an encoded plan.
type Artifact struct {
	Manifest Manifest
	// Files holds the content of every file but report.json, manifest.json included.
	Files map[string][]byte
	// Digest is the plan digest in hexadecimal.
	Digest string
}

// Encode turns a plan into its files.
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

// validate checks the parts of a plan against one another.
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
		return invalidf("front has %d placements; allowed are %d", len(p.Front), maxFront)
	}
	if c := p.Copies; c != nil && (len(c.Points) > maxFront || c.Chosen != p.Placement.SlotsPerRank-p.Placement.Experts/p.Placement.Ranks) {
		return invalidf("copies has %d redundant slots per rank, of %d that were compared; %s has %d, and allowed are %d to compare",
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

// checkSlots bounds the maps of a placement.
func checkSlots(p *placement.Placement, hiddenLayers int) error {
	if hiddenLayers > maxHiddenLayers {
		return invalidf("hidden_layers is %d; allowed is up to %d", hiddenLayers, maxHiddenLayers)
	}
	if slots := p.Ranks * p.SlotsPerRank; hiddenLayers*slots > maxMapSlots {
		return invalidf("hidden_layers is %d, with %d slots; allowed are up to %d slots in all layers", hiddenLayers, slots, maxMapSlots)
	}
	return nil
}

// validateTables checks that there are the tables of attention and forecast, and no others, and each of them.
func validateTables(p *solver.Plan) error {
	if (p.Context != nil) != p.Forecast.Contextual() || (p.LookAhead != nil) != (p.Forecast == solver.LookAhead) || (p.LookBack != nil) != (p.Forecast == solver.LookBack) {
		return invalidf("%s does not hold the tables of forecast %s, and those alone", TablesFile, p.Forecast)
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
		return invalidf("%s does not hold the tables of attention %s, and those alone", TablesFile, p.Attention)
	}
	return invalidf("attention is %q; allowed is dp, tp", p.Attention)
}

// validateFiles checks what plans may have in files of their own.
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

// checkDrift checks the calibration against the ranks that requests of the plan have.
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

// namesObjective reports whether the manifest names the objective: activations are the usual one.
func namesObjective(p *solver.Plan) bool {
	return p.Objective != "" && p.Objective != placement.Activation
}

// isDigest reports whether text is a sha256 in the form that digest gives it.
func isDigest(text string) bool {
	sum, err := hex.DecodeString(text)
	return err == nil && len(sum) == sha256.Size && hex.EncodeToString(sum) == text
}

// OnLayoutOf makes a plan one of new tables for the placement of another, which pods may be serving with. The placements must be the
// same byte for byte; the plan that is named is always the one that the placement was solved for.
func OnLayoutOf(p *solver.Plan, current *Artifact) error {
	text, err := encodeJSON(p.Placement)
	if err != nil {
		return err
	}
	if !bytes.Equal(text, current.Files[PlacementFile]) {
		return invalidf("%s of the new tables is not that of plan %s", PlacementFile, current.Digest)
	}
	p.Layout = cmp.Or(current.Manifest.Layout, current.Digest)
	return nil
}

func digest(content []byte) string {
	sum := sha256.Sum256(content)
	return hex.EncodeToString(sum[:])
}

// encodeJSON ends in a line feed, as text files do.
func encodeJSON(v any) ([]byte, error) {
	text, err := json.Marshal(v)
	return append(text, '\n'), err
}
