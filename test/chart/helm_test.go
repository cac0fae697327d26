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

// template renders the chart.
func template(t *testing.T, values string, args ...string) (string, error) {
	t.Helper()
	return helm(t, nil, values, append([]string{"template", "semmoe", directory, "--namespace", namespace}, args...)...)
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
	var all []*unstructured.Unstructured
	for documents := utilyaml.NewYAMLOrJSONDecoder(strings.NewReader(manifest), 4096); ; {
		u := &unstructured.Unstructured{}
		if err := documents.Decode(u); errors.Is(err, io.EOF) {
			return all
		} else if err != nil {
			t.Fatal(err)
		}
		if len(u.Object) > 0 {
			all = append(all, u)
		}
	}
}

// key returns a unique name of an object in a cluster.
func key(u *unstructured.Unstructured) string {
	return fmt.Sprintf("%s %s/%s", u.GroupVersionKind(), u.GetNamespace(), u.GetName())
}
