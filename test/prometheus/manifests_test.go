// SPDX-License-Identifier: Apache-2.0

package alerts

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"
)

// manifests holds the objects of config/monitoring.
type manifests struct {
	rule            *monitoringv1.PrometheusRule
	services        []*corev1.Service
	serviceMonitors []*monitoringv1.ServiceMonitor
	podMonitors     []*monitoringv1.PodMonitor
}

// renderedManifests reads config/monitoring, which is rendered from the chart. It fails the test for unknown fields.
func renderedManifests(t *testing.T) *manifests {
	t.Helper()
	m := &manifests{}
	for _, name := range []string{"rules.yaml", "monitors.yaml"} {
		for _, document := range documents(t, filepath.Join(repository, "config", "monitoring", name)) {
			var kind metav1.TypeMeta
			if err := yaml.Unmarshal(document, &kind); err != nil {
				t.Fatal(err)
			}
			switch kind.Kind {
			case "PrometheusRule":
				m.rule = decode(t, document, &monitoringv1.PrometheusRule{})
			case "Service":
				m.services = append(m.services, decode(t, document, &corev1.Service{}))
			case "ServiceMonitor":
				m.serviceMonitors = append(m.serviceMonitors, decode(t, document, &monitoringv1.ServiceMonitor{}))
			case "PodMonitor":
				m.podMonitors = append(m.podMonitors, decode(t, document, &monitoringv1.PodMonitor{}))
			default:
				t.Errorf("file %s contains an unexpected %s", name, kind.Kind)
			}
		}
	}
	if m.rule == nil {
		t.Fatal("config/monitoring has no PrometheusRule")
	}
	return m
}

func decode[T any](t *testing.T, document []byte, into *T) *T {
	t.Helper()
	if err := yaml.UnmarshalStrict(document, into); err != nil {
		t.Fatalf("%v in:\n%s", err, document)
	}
	return into
}

// documents returns the YAML documents of a file.
func documents(t *testing.T, file string) [][]byte {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var all [][]byte
	for reader := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text))); ; {
		document, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		if len(bytes.TrimSpace(document)) > 0 {
			all = append(all, document)
		}
	}
}

func selects(t *testing.T, selector *metav1.LabelSelector, of map[string]string) bool {
	t.Helper()
	s, err := metav1.LabelSelectorAsSelector(selector)
	if err != nil {
		t.Fatal(err)
	}
	return s.Matches(labels.Set(of))
}
