// SPDX-License-Identifier: Apache-2.0

package bundle

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"path/filepath"
	"slices"

	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/files/regularfile"
	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/solver/placement"
)

// Mounted is a plan as it is mounted in the pod of an engine.
type Mounted struct {
	// Digest is the plan digest: the digest of the manifest.
	Digest    artifact.Digest
	Manifest  plan.Manifest
	Placement placement.Placement
}

// Check verifies the plan in a directory: a mounted ConfigMap with the content of ConfigMapData, or a plan directory.
// The manifest must have the digest, unless the digest is empty. Every file that exists must match the manifest, and
// placement.json and an engine's expert map or gate-permutation.json must exist.
func Check(dir, planDigest string) (*Mounted, error) {
	if planDigest != "" {
		if _, err := artifact.ParseDigest(planDigest); err != nil {
			return nil, fmt.Errorf("plan digest: %w", err)
		}
	}
	text, err := regularfile.Read(filepath.Join(dir, plan.ManifestFile), plan.MaxBytes(plan.ManifestFile))
	if err != nil {
		return nil, fmt.Errorf("%w: check that the ConfigMap of the plan is mounted there", err)
	}
	m := &Mounted{Digest: digestOf(text)}
	if planDigest != "" && string(m.Digest) != planDigest {
		return nil, fmt.Errorf("%s contains plan %s, want %s", dir, m.Digest, planDigest)
	}
	if err := json.Unmarshal(text, &m.Manifest); err != nil {
		return nil, fmt.Errorf("%s: %w", plan.ManifestFile, err)
	}
	if m.Manifest.Format != plan.Format {
		return nil, fmt.Errorf("%s: format is %q; this version reads %q", plan.ManifestFile, m.Manifest.Format, plan.Format)
	}
	files, err := m.read(dir)
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(files[plan.PlacementFile], &m.Placement); err != nil {
		return nil, fmt.Errorf("%s: %w", plan.PlacementFile, err)
	}
	if err := m.Placement.Validate(); err != nil {
		return nil, fmt.Errorf("%s: %w", plan.PlacementFile, err)
	}
	_, reaches := files[plan.GatePermutationFile]
	for name, content := range files {
		isMap, err := plan.CheckMap(name, content, &m.Placement, m.Manifest.HiddenLayers)
		if err != nil {
			return nil, err
		}
		reaches = reaches || isMap
	}
	if !reaches {
		return nil, fmt.Errorf("%s contains neither an expert map nor %s", dir, plan.GatePermutationFile)
	}
	return m, nil
}

// read reads and verifies the existing files of the manifest.
func (m *Mounted) read(dir string) (map[string][]byte, error) {
	files := map[string][]byte{}
	for name, digest := range m.Manifest.Files {
		content, err := readEither(dir, name)
		if errors.Is(err, fs.ErrNotExist) && name != plan.PlacementFile {
			continue // a ConfigMap contains only the files that its engine needs
		}
		if err != nil {
			return nil, err
		}
		if got := digestOf(content); string(got) != digest {
			return nil, fmt.Errorf("%s is damaged: its sha256 is %s, %s lists %s", name, got, plan.ManifestFile, digest)
		}
		files[name] = content
	}
	if _, has := files[plan.PlacementFile]; !has {
		return nil, fmt.Errorf("%s does not list %s", plan.ManifestFile, plan.PlacementFile)
	}
	return files, nil
}

// readEither reads a file by its name, or by its base name, which is its key in a ConfigMap.
func readEither(dir, name string) ([]byte, error) {
	content, err := regularfile.Read(filepath.Join(dir, filepath.FromSlash(name)), plan.MaxBytes(name))
	if errors.Is(err, fs.ErrNotExist) {
		return regularfile.Read(filepath.Join(dir, path.Base(name)), plan.MaxBytes(name))
	}
	return content, err
}

func digestOf(content []byte) artifact.Digest {
	digest, _, _ := artifact.DigestOf(bytes.NewReader(content)) // reading from memory cannot fail
	return digest
}

// CheckModel returns the reason for which an engine with this number of ranks must not serve a model with the plan, or nil.
// modelDigest is the model that the plan must be made for.
func (m *Mounted) CheckModel(model checkpoint.Report, modelDigest string, ranks int) error {
	p := &m.Placement
	var layers []int
	for _, layer := range p.Layers {
		layers = append(layers, layer.Layer)
	}
	switch {
	case m.Manifest.ModelDigest == "":
		return fmt.Errorf("the plan has no model digest, because its routing trace has no model_digest: make the plan from a profile")
	case m.Manifest.ModelDigest != modelDigest:
		return fmt.Errorf("the plan is for model %q, want %q", m.Manifest.ModelDigest, modelDigest)
	case model.ModelDigest != modelDigest:
		return fmt.Errorf("the checkpoint has digest %q, but the plan is for %q: the model changed after it was profiled", model.ModelDigest, modelDigest)
	case p.Experts != model.Experts:
		return fmt.Errorf("the plan places %d experts; the model has %d", p.Experts, model.Experts)
	case m.Manifest.HiddenLayers != model.Layers:
		return fmt.Errorf("the plan is for %d layers; the model has %d", m.Manifest.HiddenLayers, model.Layers)
	case !slices.Equal(layers, model.MoELayers):
		return fmt.Errorf("the plan places the layers %v; the model's MoE layers are %v", layers, model.MoELayers)
	case p.Ranks != ranks:
		return fmt.Errorf("the plan is for EP size %d; the engine has %d", p.Ranks, ranks)
	}
	return nil
}
