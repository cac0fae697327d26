// SPDX-License-Identifier: Apache-2.0

package api

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

// TestModelSource checks which sources, volumes and paths of a model the API server accepts together, and that a stored
// object without a volume has none.
func TestModelSource(t *testing.T) {
	const claim = "volume: {persistentVolumeClaim: {claimName: models}}"
	for name, tc := range map[string]struct {
		model string
		want  []string
	}{
		"hub":                 {"{path: /models/m, " + claim + ", source: {huggingFace: {repo: org/m}}}", nil},
		"hub-gated":           {"{path: /models/m, " + claim + ", source: {huggingFace: {repo: org/m, revision: refs/pr/1, endpoint: 'http://mirror:8080/hf', tokenSecretRef: {name: hub, key: token}}}}", nil},
		"image":               {"{source: {oci: {image: 'registry.example/m@sha256:1', pullPolicy: IfNotPresent}}}", nil},
		"no-volume":           {"{path: /models/m}", []string{"spec.model.volume", "volume is required, unless source.oci provides the checkpoint"}},
		"hub-without-volume":  {"{path: /models/m, source: {huggingFace: {repo: org/m}}}", []string{"spec.model.volume", "volume is required"}},
		"hub-on-a-node":       {"{path: /models/m, volume: {hostPath: {path: /srv}}, source: {huggingFace: {repo: org/m}}}", []string{"spec.model.volume", "source.huggingFace needs a persistentVolumeClaim"}},
		"hub-at-the-root":     {"{" + claim + ", source: {huggingFace: {repo: org/m}}}", []string{"spec.model.path", "source.huggingFace needs a directory below /models"}},
		"image-and-volume":    {"{" + claim + ", source: {oci: {image: 'm:1'}}}", []string{"spec.model.volume", "source.oci does not allow volume"}},
		"two-sources":         {"{path: /models/m, " + claim + ", source: {huggingFace: {repo: org/m}, oci: {image: 'm:1'}}}", []string{"exactly one of huggingFace and oci is required"}},
		"no-source":           {"{path: /models/m, " + claim + ", source: {}}", []string{"exactly one of huggingFace and oci is required"}},
		"repo-with-parent":    {"{path: /models/m, " + claim + ", source: {huggingFace: {repo: '../m'}}}", []string{"spec.model.source.huggingFace.repo"}},
		"endpoint-with-token": {"{path: /models/m, " + claim + ", source: {huggingFace: {repo: org/m, endpoint: 'https://user:secret@hub'}}}", []string{"spec.model.source.huggingFace.endpoint"}},
		"revision-with-space": {"{path: /models/m, " + claim + ", source: {huggingFace: {repo: org/m, revision: 'a b'}}}", []string{"spec.model.source.huggingFace.revision"}},
		"unknown-policy":      {"{source: {oci: {image: 'm:1', pullPolicy: Sometimes}}}", []string{"spec.model.source.oci.pullPolicy"}},
	} {
		t.Run(name, func(t *testing.T) {
			text := "apiVersion: semmoe.io/v1alpha1\nkind: MoEDeployment\nmetadata: {name: source-" + name + ", namespace: default}\n" +
				"spec:\n  model: " + tc.model + "\n  engine: {image: \"engine:1\"}\n  parallelism: {expertParallelSize: 4}\n"
			refusedWith(t, api.Create(t.Context(), object(t, text)), tc.want)
		})
	}
	// A Go client writes what it read: an absent volume must stay absent.
	image := &semmoev1.MoEDeployment{}
	if err := api.Get(t.Context(), client.ObjectKey{Namespace: "default", Name: "source-image"}, image); err != nil {
		t.Fatal(err)
	}
	image.Spec.Engine.Image = "engine:2"
	if err := api.Update(t.Context(), image); err != nil {
		t.Errorf("failed to update a model without a volume: %v", err)
	}
}

// TestProfileSourceRefused checks that a profile names the volume with the checkpoint.
func TestProfileSourceRefused(t *testing.T) {
	source := strings.NewReplacer("NAME", "source", "{hostPath: {path: /srv/m}}", "{hostPath: {path: /srv/m}}, path: /models/m, source: {huggingFace: {repo: org/m}}").Replace(minimalProfile)
	source = strings.Replace(source, "hostPath: {path: /srv/m}", "persistentVolumeClaim: {claimName: models}", 1)
	refusedWith(t, api.Create(t.Context(), object(t, source)), []string{"spec.model.source", "A MoEDeployment downloads checkpoints"})
}

// TestEngineTLSRefused checks that spec.engine.tls needs request routers, and that a profile has none.
func TestEngineTLSRefused(t *testing.T) {
	const image, secured = `{image: "engine:1"}`, `{image: "engine:1", tls: {secretName: a}}`
	for _, mode := range []string{"EndpointPicker", "None"} {
		text := strings.NewReplacer("NAME", "engine-tls", image, secured).Replace(minimal)
		moed := object(t, text)
		if err := unstructured.SetNestedField(moed.Object, mode, "spec", "routing", "mode"); err != nil {
			t.Fatal(err)
		}
		refusedWith(t, api.Create(t.Context(), moed), []string{"spec.engine.tls", "needs routing.mode Router"})
	}
	profile := strings.NewReplacer("NAME", "engine-tls", image, secured).Replace(minimalProfile)
	refusedWith(t, api.Create(t.Context(), object(t, profile)), []string{"spec.engine.tls", "tls is not allowed"})
}
