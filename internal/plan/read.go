// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"bytes"
	"cmp"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"

	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/files/regularfile"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/drift"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/schedule"
)

// required are the files of every plan.
func required() []string {
	names := []string{PlacementFile, TablesFile}
	for _, adapter := range registry.All() {
		if name := MapFile(adapter); name != "" {
			names = append(names, name)
		}
	}
	return names
}

// optional are the files of some plans.
var optional = []string{GatePermutationFile, DriftFile, ScheduleFile, HardwareFile}

// Read reads the plan in a directory and verifies every hash. It does not read report.json.
func Read(dir string) (*solver.Plan, *Artifact, error) {
	return ReadFiles(func(name string) ([]byte, error) { return readFile(dir, name) })
}

// ReadFiles reads and verifies a plan from a function that returns files by name.
func ReadFiles(file func(name string) ([]byte, error)) (*solver.Plan, *Artifact, error) {
	content, err := file(ManifestFile)
	if err != nil {
		return nil, nil, err
	}
	if len(content) > maxSmallBytes {
		return nil, nil, invalidf("%s: %d bytes are too many: the maximum is %d", ManifestFile, len(content), maxSmallBytes)
	}
	a := &Artifact{Files: map[string][]byte{ManifestFile: content}, Digest: digest(content)}
	if err := decodeJSON(ManifestFile, content, &a.Manifest); err != nil {
		return nil, nil, err
	}
	if a.Manifest.Format != Format {
		return nil, nil, invalidf("%s: format is %q; this version reads %q", ManifestFile, a.Manifest.Format, Format)
	}
	for _, name := range required() {
		if _, listed := a.Manifest.Files[name]; !listed {
			return nil, nil, invalidf("%s: %s is not listed", ManifestFile, name)
		}
	}
	for name, want := range a.Manifest.Files {
		if !slices.Contains(required(), name) && !slices.Contains(optional, name) {
			return nil, nil, invalidf("%s: %q is not a file of a plan", ManifestFile, name)
		}
		if content, err = file(name); err != nil {
			return nil, nil, err
		}
		if int64(len(content)) > MaxBytes(name) {
			return nil, nil, invalidf("%s: %d bytes are too many: the maximum is %d", name, len(content), MaxBytes(name))
		}
		if got := digest(content); got != want {
			return nil, nil, invalidf("%s is damaged: its sha256 is %s, %s lists %s", name, got, ManifestFile, want)
		}
		a.Files[name] = content
	}
	p, err := Decode(a)
	if err != nil {
		return nil, nil, err
	}
	for name, content := range a.Files {
		if _, err := CheckMap(name, content, p.Placement, p.HiddenLayers); err != nil {
			return nil, nil, err
		}
	}
	return p, a, nil
}

// DigestOf returns the digest of the plan in a directory, without verifying its files.
func DigestOf(dir string) (string, error) {
	content, err := readFile(dir, ManifestFile)
	if err != nil {
		return "", err
	}
	return digest(content), nil
}

// Decode decodes verified files.
func Decode(a *Artifact) (*solver.Plan, error) {
	m := a.Manifest
	p := &solver.Plan{
		Attention: m.Attention, Forecast: m.Forecast, Algorithm: m.Algorithm, Placement: &placement.Placement{},
		Shape:        cost.Shape{TopK: m.TopK, HiddenSize: m.HiddenSize, ActiveParameters: m.ActiveParameters},
		HiddenLayers: m.HiddenLayers, Vocabulary: m.Vocabulary, TrainPercent: m.TrainPercent, Seed: m.Seed,
		ModelDigest: m.ModelDigest, Layout: m.Layout, Objective: cmp.Or(m.Objective, placement.Activation), RanksPerNode: m.RanksPerNode, RankCapacity: m.RankCapacity, Front: m.Front, Chosen: m.Chosen, Copies: m.Copies,
	}
	trace, err := hex.DecodeString(m.TraceDigest)
	if err != nil || len(trace) != len(p.TraceDigest) {
		return nil, invalidf("%s: trace_digest is %q; it must be a sha256", ManifestFile, m.TraceDigest)
	}
	copy(p.TraceDigest[:], trace)
	if err := decodeJSON(PlacementFile, a.Files[PlacementFile], p.Placement); err != nil {
		return nil, err
	}
	if got := digest(a.Files[PlacementFile]); got != m.LayoutDigest {
		return nil, invalidf("%s: layout_digest is %s, %s has %s", ManifestFile, m.LayoutDigest, PlacementFile, got)
	}
	if err := p.Placement.Validate(); err != nil {
		return nil, invalidf("%s: %v", PlacementFile, err)
	}
	p.Shape.MoELayers = len(p.Placement.Layers)
	if err := decodeTables(p, a.Files[TablesFile], m.LayoutDigest); err != nil {
		return nil, err
	}
	if content, has := a.Files[DriftFile]; has {
		p.Drift = &drift.Calibration{}
		if err := decodeJSON(DriftFile, content, p.Drift); err != nil {
			return nil, err
		}
	}
	if content, has := a.Files[ScheduleFile]; has {
		p.Schedule = &schedule.Schedule{}
		if err := decodeJSON(ScheduleFile, content, p.Schedule); err != nil {
			return nil, err
		}
	}
	if content, has := a.Files[HardwareFile]; has {
		p.Hardware = &hardware.Profile{}
		if err := decodeJSON(HardwareFile, content, p.Hardware); err != nil {
			return nil, err
		}
	}
	return p, validate(p)
}

func readFile(dir, name string) ([]byte, error) {
	content, err := regularfile.Read(filepath.Join(dir, name), MaxBytes(name))
	if errors.Is(err, os.ErrNotExist) {
		return nil, invalidf("%s is missing in %s: not a plan, or an incomplete copy", name, dir)
	}
	if errors.Is(err, regularfile.ErrTooLarge) {
		return nil, invalidf("%v", err)
	}
	return content, err
}

func decodeJSON(name string, content []byte, into any) error {
	decoder := json.NewDecoder(bytes.NewReader(content))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(into); err != nil {
		return invalidf("%s: %v", name, err)
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return invalidf("%s: text after the JSON object", name)
	}
	return nil
}
