// SPDX-License-Identifier: Apache-2.0

package podtemplate

import (
	"encoding/json"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

// Reserved describes what the operator reserves in the pods that a user's template is merged into.
type Reserved struct {
	// Engine is the name of the container of the user's engine. Its image, command and args have their own fields in
	// the spec.
	Engine string
	// Managed are containers of the operator's image for which users may set resources and variables.
	Managed []string
	// Containers are the other containers of the operator's image. Users may not change them.
	Containers []string
	// Volumes are the operator's volumes, with their content. Users may not replace them, and may mount them only
	// read-only.
	Volumes map[string]string
	// Secret is the volume in Volumes that only the operator's containers may mount. Audience is the audience of its
	// token.
	Secret, Audience string
	// Shared are volumes in Volumes that users may mount with write access.
	Shared []string
	// Exposed reports whether a container with the token runs next to user-provided containers, which must not see its
	// processes.
	Exposed bool
	// Mounts are the directories that the operator mounts in the engine's container.
	Mounts []string
	// Variables are the variables of Managed that users may not set, in addition to those with the prefix SEMMOE_.
	Variables []string
}

// Check returns why a user's template must not be merged into a pod; nil if it may. The error starts with the path of
// the field; field is the path of the template.
func Check(field string, template *corev1.PodTemplateSpec, r Reserved) error {
	if template == nil {
		return nil
	}
	if err := CheckMetadata(field+".metadata", template.Labels, template.Annotations); err != nil {
		return err
	}
	spec := field + ".spec"
	if err := checkKeys(spec+".nodeSelector", template.Spec.NodeSelector); err != nil {
		return err
	}
	if len(template.Spec.EphemeralContainers) > 0 {
		return fmt.Errorf("%s.ephemeralContainers: a pod is created without them: remove the field", spec)
	}
	if r.Exposed && ptr.Deref(template.Spec.ShareProcessNamespace, false) {
		return fmt.Errorf("%s.shareProcessNamespace: true is invalid: it gives other containers the token for the artifact store: remove the field", spec)
	}
	if r.Exposed && template.Spec.HostPID {
		return fmt.Errorf("%s.hostPID: true is invalid: it gives other containers the token for the artifact store: remove the field", spec)
	}
	if err := r.checkVolumes(spec+".volumes", template.Spec.Volumes); err != nil {
		return err
	}
	seen := map[string]bool{}
	for _, list := range []struct {
		field      string
		containers []corev1.Container
		init       bool
	}{{spec + ".initContainers", template.Spec.InitContainers, true}, {spec + ".containers", template.Spec.Containers, false}} {
		for i := range list.containers {
			container := &list.containers[i]
			if seen[container.Name] {
				return fmt.Errorf("%s: %q is invalid: the template has another container of that name", list.field, container.Name)
			}
			seen[container.Name] = true
			if err := r.checkContainer(list.field, container, list.init); err != nil {
				return err
			}
		}
	}
	return nil
}

// CheckMetadata returns why labels and annotations must not be merged into those of a pod; nil if they may.
func CheckMetadata(field string, labels, annotations map[string]string) error {
	for _, metadata := range []struct {
		field string
		keys  map[string]string
	}{{field + ".labels", labels}, {field + ".annotations", annotations}} {
		if err := checkKeys(metadata.field, metadata.keys); err != nil {
			return err
		}
		for _, key := range slices.Sorted(maps.Keys(metadata.keys)) {
			domain, _, _ := strings.Cut(key, "/")
			if group := semmoev1.GroupVersion.Group; domain == group || strings.HasSuffix(domain, "."+group) {
				return fmt.Errorf("%s: %q is reserved: keys under %s/ belong to the operator", metadata.field, key, group)
			}
		}
	}
	return nil
}

// checkKeys rejects keys that a strategic merge interprets as directives: $patch in a map would remove the operator's
// settings.
func checkKeys[V any](field string, values map[string]V) error {
	for _, key := range slices.Sorted(maps.Keys(values)) {
		if strings.HasPrefix(key, "$") {
			return fmt.Errorf("%s: %q is invalid: a key begins with a letter or a digit", field, key)
		}
	}
	return nil
}

func (r Reserved) checkVolumes(field string, volumes []corev1.Volume) error {
	seen := map[string]bool{}
	for _, volume := range volumes {
		if holds, ours := r.Volumes[volume.Name]; ours {
			return fmt.Errorf("%s: %q is reserved by the operator (%s): use another name", field, volume.Name, holds)
		}
		if seen[volume.Name] {
			return fmt.Errorf("%s: %q is invalid: the template has another volume of that name", field, volume.Name)
		}
		seen[volume.Name] = true
		if volume.Projected == nil {
			continue
		}
		for _, source := range volume.Projected.Sources {
			if token := source.ServiceAccountToken; token != nil && token.Audience == r.Audience {
				return fmt.Errorf("%s: the audience %q of volume %q is reserved: only containers of the operator use the artifact store", field, token.Audience, volume.Name)
			}
		}
	}
	return nil
}

func (r Reserved) checkContainer(field string, container *corev1.Container, init bool) error {
	name := container.Name
	switch {
	case slices.Contains(r.Containers, name) || init && (name == r.Engine || slices.Contains(r.Managed, name)):
		return fmt.Errorf("%s: %q is reserved by the operator: use another name", field, name)
	case slices.Contains(r.Managed, name):
		return r.checkManaged(field, container)
	case name != r.Engine && container.Image == "":
		return fmt.Errorf("%s: container %q has no image; to change the engine's container, name it %q", field, name, r.Engine)
	case name == r.Engine && container.Image != "":
		return fmt.Errorf("%s: the image of container %q comes from spec.engine.image: set it there", field, name)
	case name == r.Engine && container.Command != nil:
		return fmt.Errorf("%s: the command of container %q comes from spec.engine.command: set it there", field, name)
	case name == r.Engine && container.Args != nil:
		return fmt.Errorf("%s: the args of container %q come from spec.engine.args: set them there", field, name)
	}
	for _, mount := range container.VolumeMounts {
		holds, ours := r.Volumes[mount.Name]
		switch {
		case mount.Name == r.Secret && r.Secret != "":
			return fmt.Errorf("%s: container %q must not mount volume %q (%s): only the operator's containers may", field, name, mount.Name, holds)
		case ours && !mount.ReadOnly && !slices.Contains(r.Shared, mount.Name):
			return fmt.Errorf("%s: container %q must mount volume %q (%s) with readOnly: true", field, name, mount.Name, holds)
		case name == r.Engine && !ours && slices.ContainsFunc(r.Mounts, func(taken string) bool { return overlap(taken, mount.MountPath) }):
			return fmt.Errorf("%s: container %q must not mount volume %q at %s: the operator mounts its own volumes there", field, name, mount.Name, mount.MountPath)
		}
	}
	for _, device := range container.VolumeDevices {
		if _, ours := r.Volumes[device.Name]; ours {
			return fmt.Errorf("%s: container %q must not use volume %q as a device: it belongs to the operator", field, name, device.Name)
		}
	}
	return nil
}

// overlap reports whether two directories are equal, or one contains the other.
func overlap(a, b string) bool {
	a, b = path.Clean("/"+a)+"/", path.Clean("/"+b)+"/"
	return strings.HasPrefix(a, b) || strings.HasPrefix(b, a)
}

// checkManaged rejects all settings except resources and variables in a container of the operator.
func (r Reserved) checkManaged(field string, container *corev1.Container) error {
	rest := container.DeepCopy()
	rest.Name, rest.Resources, rest.Env = "", corev1.ResourceRequirements{}, nil
	data, err := json.Marshal(rest)
	if err != nil {
		return err
	}
	var left map[string]any
	if err := json.Unmarshal(data, &left); err != nil {
		return err
	}
	delete(left, "name")
	delete(left, "resources")
	if names := slices.Sorted(maps.Keys(left)); len(names) > 0 {
		return fmt.Errorf("%s: %s of container %q is set by the operator: only resources and env may be changed", field, names[0], container.Name)
	}
	for _, env := range container.Env {
		if strings.HasPrefix(env.Name, "SEMMOE_") || slices.Contains(r.Variables, env.Name) {
			return fmt.Errorf("%s: %s of container %q is set by the operator: use another name", field, env.Name, container.Name)
		}
	}
	return nil
}
