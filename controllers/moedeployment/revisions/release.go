// SPDX-License-Identifier: Apache-2.0

package revisions

import (
	"slices"

	corev1 "k8s.io/api/core/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/registry"
)

// Release returns the release of the engine that the spec selects: the release that a workload of the same image
// reported, else the release in the image's tag, else the zero value.
func Release(moed *semmoev1.MoEDeployment, workloads []*Workload) engine.Release {
	adapter, err := registry.For(string(moed.Spec.Engine.Type))
	if err != nil {
		return engine.Release{} // Validate reports an unknown engine
	}
	image := engineImage(moed)
	for _, w := range workloads {
		template := w.Template()
		if template.Annotations[semmoev1.AnnotationEngine] != adapter.Type || imageIn(template) != image {
			continue
		}
		if release := ReportedRelease(w); release.Known() {
			return release
		}
	}
	return adapter.ImageRelease(image)
}

// ReportedRelease returns the release that a workload's engine reported, or the zero value.
func ReportedRelease(w *Workload) engine.Release {
	return engine.ParseRelease(w.Annotations[semmoev1.AnnotationEngineRelease])
}

// engineImage returns the image of the engine's container, which spec.template may replace.
func engineImage(moed *semmoev1.MoEDeployment) string {
	if template := moed.Spec.Template; template != nil {
		if image := imageIn(template); image != "" {
			return image
		}
	}
	return moed.Spec.Engine.Image
}

// imageIn returns the image of the engine's container in a template, or "".
func imageIn(template *corev1.PodTemplateSpec) string {
	at := slices.IndexFunc(template.Spec.Containers, func(c corev1.Container) bool { return c.Name == semmoev1.EngineContainer })
	if at < 0 {
		return ""
	}
	return template.Spec.Containers[at].Image
}
