// SPDX-License-Identifier: Apache-2.0

// Package chart tests the Helm chart with the Helm version that internal/tools/helm pins, and its objects with a real
// API server.
package chart

import (
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"

	"github.com/semmoe/operator/test/programs"
	"github.com/semmoe/operator/test/tier"
)

// namespace is the namespace in config/default.
const namespace = "semmoe-system"

var (
	repository = filepath.Join("..", "..")
	directory  = filepath.Join(repository, "charts", "semmoe-operator")
)

// helm runs a Helm command. values is YAML, for commands with the flag --values, and takes precedence over the required
// values in testdata/image.yaml.
func helm(t *testing.T, env []string, values string, args ...string) (string, error) {
	t.Helper()
	path, err := programs.Helm()
	tier.Require(t, err)
	if values != "" {
		args = append(args, "--values", filepath.Join("testdata", "image.yaml"), "--values", "-")
	}
	return programs.Run(path, env, values, args...)
}

// withoutCRDs are the arguments to render the chart without CRDs, which take most of the time.
var withoutCRDs = []string{"--set", "crds.enabled=false"}

// manifests contains the rendered manifests by values and arguments, and parsed the documents of each manifest: several
// tests check the same ones.
var (
	manifests = map[string]string{}
	parsed    = map[string][]*unstructured.Unstructured{}
)

// template renders the chart.
func template(t *testing.T, values string, args ...string) (string, error) {
	t.Helper()
	inputs := strings.Join(append([]string{values}, args...), "\x00")
	if manifest, ok := manifests[inputs]; ok {
		return manifest, nil
	}
	manifest, err := helm(t, nil, values, append([]string{"template", "semmoe", directory, "--namespace", namespace}, args...)...)
	if err == nil {
		manifests[inputs] = manifest
	}
	return manifest, err
}

// render renders the chart with valid values.
func render(t *testing.T, values string, args ...string) []*unstructured.Unstructured {
	t.Helper()
	manifest, err := template(t, values, args...)
	if err != nil {
		t.Fatal(err)
	}
	return objects(t, manifest)
}

// objects returns the documents of a manifest.
func objects(t *testing.T, manifest string) []*unstructured.Unstructured {
	t.Helper()
	all, ok := parsed[manifest]
	for documents := utilyaml.NewYAMLOrJSONDecoder(strings.NewReader(manifest), 4096); !ok; {
		u := &unstructured.Unstructured{}
		if err := documents.Decode(u); errors.Is(err, io.EOF) {
			parsed[manifest] = all
			break
		} else if err != nil {
			t.Fatal(err)
		}
		if len(u.Object) > 0 {
			all = append(all, u)
		}
	}
	copies := make([]*unstructured.Unstructured, len(all))
	for i, u := range all {
		copies[i] = u.DeepCopy()
	}
	return copies
}

// key returns a unique name of an object in a cluster.
func key(u *unstructured.Unstructured) string {
	return fmt.Sprintf("%s %s/%s", u.GroupVersionKind(), u.GetNamespace(), u.GetName())
}
