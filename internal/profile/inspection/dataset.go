// SPDX-License-Identifier: Apache-2.0

package inspection

import (
	"path"

	corev1 "k8s.io/api/core/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

const datasetMountPath = "/dataset"

// Dataset is the path of the data set in a container, and the volumes and mounts that it needs.
type Dataset struct {
	Path    string
	Volumes []corev1.Volume
	Mounts  []corev1.VolumeMount
}

// DatasetMount returns the path, volumes and mounts of a data set. A data set in spec.path is on the volume of the
// model, which the pod mounts anyway.
func DatasetMount(spec semmoev1.DatasetSpec) Dataset {
	var source corev1.VolumeSource
	var file string
	switch {
	case spec.ConfigMap != nil:
		// Items contains the key, so that the pod waits for a missing key, and starts when the key is added.
		file = spec.ConfigMap.Key
		source.ConfigMap = &corev1.ConfigMapVolumeSource{
			LocalObjectReference: corev1.LocalObjectReference{Name: spec.ConfigMap.Name},
			Items:                []corev1.KeyToPath{{Key: file, Path: file}},
		}
	case spec.PersistentVolumeClaim != nil:
		file = spec.PersistentVolumeClaim.Path
		source.PersistentVolumeClaim = &corev1.PersistentVolumeClaimVolumeSource{ClaimName: spec.PersistentVolumeClaim.ClaimName, ReadOnly: true}
	default:
		return Dataset{Path: spec.Path}
	}
	return Dataset{
		Path:    path.Join(datasetMountPath, file),
		Volumes: []corev1.Volume{{Name: semmoev1.DatasetVolume, VolumeSource: source}},
		Mounts:  []corev1.VolumeMount{{Name: semmoev1.DatasetVolume, MountPath: datasetMountPath, ReadOnly: true}},
	}
}
