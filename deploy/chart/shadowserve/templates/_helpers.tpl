{{/* Names and labels. Parameters of a part: root (the chart's context), name (component), part (its values). */}}
{{- define "shadowserve.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- default (ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name)) .Values.fullnameOverride | trunc 42 | trimSuffix "-" -}}
{{- end }}

{{- define "shadowserve.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .name }}
{{- end }}

{{- define "shadowserve.labels" -}}
{{ include "shadowserve.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "shadowserve.metadata" -}}
name: {{ include "shadowserve.fullname" .root }}-{{ .name }}
namespace: {{ .root.Release.Namespace }}
labels: {{- include "shadowserve.labels" . | nindent 2 }}
{{- end }}

{{- define "shadowserve.serviceAccountName" -}}
{{- default (ternary (include "shadowserve.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name -}}
{{- end }}

{{- define "shadowserve.image" -}}
{{- $shared := .root.Values.image -}}
{{- $registry := required "image.registry is empty: build and push the images of deploy/images, then name the registry" (default $shared.registry .part.image.registry) -}}
{{- $tag := default .root.Chart.AppVersion (default $shared.tag .part.image.tag) -}}
image: {{ printf "%s/%s:%s" $registry .part.image.repository $tag }}{{ with .part.image.digest }}@{{ . }}{{ end }}
imagePullPolicy: {{ $shared.pullPolicy }}
{{- end }}

{{/* Metadata of pods: shared labels, checksum of the configuration. */}}
{{- define "shadowserve.podMetadata" -}}
labels:
  {{- include "shadowserve.labels" . | nindent 2 }}
  {{- if or (eq .name "data-plane") .sidecar }}
  shadowserve/data-plane: {{ .root.Release.Name | quote }}
  {{- end }}
  {{- with .part.podLabels }}{{ toYaml . | nindent 2 }}{{ end }}
annotations:
  checksum/config: {{ .config | sha256sum }}
  {{- with .part.podAnnotations }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end }}

{{/* A mapping with the keys of another one above it, false and 0 included, which merge would leave out. */}}
{{- define "shadowserve.override" -}}
{{- $result := deepCopy (first .) -}}
{{- range $key, $value := last . }}{{ $_ := set $result $key $value }}{{ end -}}
{{- toYaml $result -}}
{{- end }}

{{- define "shadowserve.podSpec" -}}
serviceAccountName: {{ include "shadowserve.serviceAccountName" .root }}
automountServiceAccountToken: {{ .root.Values.serviceAccount.automount }}
# Service links would be variables SHADOWSERVE_..., which the programs refuse.
enableServiceLinks: false
securityContext: {{- include "shadowserve.override" (list .root.Values.podSecurityContext .part.podSecurityContext) | nindent 2 }}
terminationGracePeriodSeconds: {{ .part.terminationGracePeriodSeconds }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- range $key := list "priorityClassName" "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" }}
{{- with get $.part $key }}
{{ $key }}: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}

{{/* Image, rights, resources and probes of a container; probes: path by kind; port: its name. */}}
{{- define "shadowserve.container" -}}
{{ include "shadowserve.image" . }}
securityContext: {{- include "shadowserve.override" (list .root.Values.securityContext .part.securityContext) | nindent 2 }}
resources: {{- toYaml .part.resources | nindent 2 }}
{{- range $kind, $path := .probes }}
{{- $probe := get $.part $kind }}
{{- if $probe.enabled }}
{{ $kind }}:
  httpGet: {path: {{ $path }}, port: {{ $.port }}}
  {{- omit $probe "enabled" | toYaml | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}

{{- define "shadowserve.probePaths" -}}
{startupProbe: /healthz, livenessProbe: /healthz, readinessProbe: /readyz}
{{- end }}

{{/* Name of the headless service of storage; its certificates hold it. */}}
{{- define "shadowserve.storageService" -}}
{{ printf "%s-storage.%s.svc.%s" (include "shadowserve.fullname" .) .Release.Namespace .Values.clusterDomain }}
{{- end }}

{{/* Configuration of storage, as YAML. */}}
{{- define "shadowserve.storageConfig" -}}
{{- $config := deepCopy .Values.storage.config -}}
{{- $disk := .Values.storage.persistence -}}
{{- if and $disk.enabled (not $config.devices) -}}
  {{- $devices := list -}}
  {{- range $index := until (int $disk.count) -}}
    {{- if eq $disk.volumeMode "Block" -}}
      {{- $devices = append $devices (dict "path" (printf "/dev/shadowserve-%d" $index)) -}}
    {{- else -}}
      {{- $unit := dict "Mi" 1 "Gi" 1024 "Ti" 1048576 -}}
      {{- $size := mul (regexFind "^[0-9]+" $disk.size) (get $unit (regexFind "..$" $disk.size)) -}}
      {{- $file := default (printf "%d MiB" (div (mul $size 9) 10)) $disk.fileSize -}}
      {{- $devices = append $devices (dict "path" (printf "/var/lib/shadowserve/disk-%d/pool" $index) "size" $file) -}}
    {{- end -}}
  {{- end -}}
  {{- $_ := set $config "devices" $devices -}}
{{- end -}}
{{- if .Values.tls.enabled -}}
  {{- $_ := set $config "tls_cert" "/etc/shadowserve/tls/tls.crt" -}}
  {{- $_ := set $config "tls_key" "/etc/shadowserve/tls/tls.key" -}}
  {{- if .Values.tls.requireClientCertificate -}}
    {{- $_ := set $config "tls_client_ca" "/etc/shadowserve/tls/ca.crt" -}}
  {{- end -}}
  {{- if .Values.tls.usersFromCertificates -}}
    {{- $_ := set $config "tls_users" "cn" -}}
  {{- end -}}
{{- end -}}
{{- if and .Values.auth.enabled .Values.auth.usersKey -}}
  {{- $_ := set $config "users_file" (printf "/etc/shadowserve/users/%s" .Values.auth.usersKey) -}}
{{- end -}}
{{- if not (or .Values.auth.enabled .Values.tls.requireClientCertificate) -}}
  {{- $_ := set $config "protected_mode" false -}}
{{- end -}}
{{- dict "storage" $config | toYaml -}}
{{- end }}

{{/* Configuration of the data plane, as YAML. */}}
{{- define "shadowserve.dataPlaneConfig" -}}
{{- $config := deepCopy .Values.dataPlane.config -}}
{{- $given := or $config.storage $config.storage_nodes $config.storage_cluster -}}
{{- if and .Values.storage.enabled (not $given) -}}
  {{- $name := printf "%s-storage" (include "shadowserve.fullname" .) -}}
  {{- $service := include "shadowserve.storageService" . -}}
  {{- if gt (int .Values.storage.replicas) 1 -}}
    {{- $_ := set $config "storage_nodes" (printf "dns:%s:6380" $service) -}}
  {{- else -}}
    {{- $_ := set $config "storage" (printf "%s-0.%s:6380" $name $service) -}}
  {{- end -}}
{{- end -}}
{{- if .Values.auth.enabled -}}
  {{- with .Values.auth.username }}{{ $_ := set $config "storage_username" . }}{{ end -}}
{{- end -}}
{{- if .Values.tls.enabled -}}
  {{- $_ := set $config "storage_tls_ca" "/etc/shadowserve/tls/ca.crt" -}}
  {{- if .Values.tls.clientExistingSecret -}}
    {{- $_ := set $config "storage_tls_cert" "/etc/shadowserve/tls/tls.crt" -}}
    {{- $_ := set $config "storage_tls_key" "/etc/shadowserve/tls/tls.key" -}}
  {{- end -}}
{{- end -}}
{{- dict "dpu" $config | toYaml -}}
{{- end }}

{{- define "shadowserve.passwordEnv" -}}
{{- with .root.Values.auth }}
{{- if and .enabled .passwordKey .existingSecret }}
- name: {{ $.variable }}
  valueFrom: {secretKeyRef: {name: {{ .existingSecret }}, key: {{ .passwordKey }}}}
{{- end }}
{{- end }}
{{- end }}

{{/* The data plane's container, in the DaemonSet or as a sidecar. */}}
{{- define "shadowserve.dataPlaneContainer" -}}
{{- $part := .Values.dataPlane -}}
name: data-plane
command: [shadowserve, dpu]
args:
  - --config
  - /etc/shadowserve/config/dpu.yaml
  - --listen
  - {{ default "unix:/run/shadowserve/dpu.sock" $part.config.listen }}
  - --metrics-host
  - {{ .Values.listenAddress | quote }}
  - --metrics-port
  - "9151"
  - --log-format
  - {{ default "json" $part.config.log_format }}
env:
  {{- include "shadowserve.passwordEnv" (dict "root" . "variable" "SHADOWSERVE_DPU_STORAGE_PASSWORD") | nindent 2 }}
  {{- with $part.env }}{{ toYaml . | nindent 2 }}{{ end }}
ports:
  - {name: metrics, containerPort: 9151}
{{ include "shadowserve.container" (dict "root" . "part" $part "port" "metrics" "probes" (include "shadowserve.probePaths" . | fromYaml)) }}
volumeMounts:
  - {name: dpu-config, mountPath: /etc/shadowserve/config, readOnly: true}
  - {name: run, mountPath: /run/shadowserve}
  - {name: shm, mountPath: /dev/shm}
  {{- if .Values.tls.enabled }}
  - {name: dpu-tls, mountPath: /etc/shadowserve/tls, readOnly: true}
  {{- end }}
  {{- if and (eq $part.mode "daemonset") $part.hostPath.disk }}
  - {name: disk, mountPath: /var/lib/shadowserve}
  {{- end }}
  {{- with $part.extraVolumeMounts }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end }}

{{- define "shadowserve.dataPlaneVolumes" -}}
- name: dpu-config
  configMap: {name: {{ include "shadowserve.fullname" . }}-data-plane}
{{- if .Values.tls.enabled }}
- name: dpu-tls
  secret:
    {{- if .Values.tls.clientExistingSecret }}
    secretName: {{ .Values.tls.clientExistingSecret }}
    {{- else }}
    secretName: {{ .Values.tls.existingSecret }}
    items: [{key: ca.crt, path: ca.crt}]
    {{- end }}
    defaultMode: 0440
{{- end }}
{{- with .Values.dataPlane.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* What an engine and a data plane share. */}}
{{- define "shadowserve.sharedVolumes" -}}
{{- if eq .Values.dataPlane.mode "sidecar" }}
- name: run
  emptyDir: {medium: Memory, sizeLimit: 1Mi}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .Values.engine.shmSize }}}
{{- else }}
- name: run
  hostPath: {path: {{ .Values.dataPlane.hostPath.run }}, type: DirectoryOrCreate}
- name: shm
  hostPath: {path: {{ .Values.dataPlane.hostPath.shm }}, type: DirectoryOrCreate}
{{- end }}
{{- end }}

{{/*
Gives the hostPath folders, which the kubelet creates as root's, to the user of a pod. Engines' pods have it, too, since
they may start first. Parameters: context, part, resources, whether it has a disk.
*/}}
{{- define "shadowserve.ownFolders" -}}
{{- $root := first . -}}
{{- $disk := last . -}}
{{- $user := include "shadowserve.override" (list $root.Values.podSecurityContext (index . 1).podSecurityContext) -}}
name: own-folders
{{ include "shadowserve.image" (dict "root" $root "part" $root.Values.dataPlane) }}
command: [chown]
{{- with fromYaml $user }}
args:
  - "{{ required "podSecurityContext.runAsUser is needed: engines and data planes share memory" .runAsUser | int64 }}:{{ required "podSecurityContext.runAsGroup is needed: engines and data planes share memory" .runAsGroup | int64 }}"
  - /run/shadowserve
  - /dev/shm
  {{- if $disk }}
  - /var/lib/shadowserve
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: false
  runAsUser: 0
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL], add: [CHOWN]}
resources: {{- toYaml (index . 2) | nindent 2 }}
volumeMounts:
  - {name: run, mountPath: /run/shadowserve}
  - {name: shm, mountPath: /dev/shm}
  {{- if $disk }}
  - {name: disk, mountPath: /var/lib/shadowserve}
  {{- end }}
{{- end }}

{{/* Values that do not work together. */}}
{{- define "shadowserve.validate" -}}
{{- $v := .Values -}}
{{- $config := $v.dataPlane.config -}}
{{- $given := or $config.storage $config.storage_nodes $config.storage_cluster -}}
{{- $keys := or $v.auth.passwordKey $v.auth.usersKey -}}
{{- if and $v.auth.enabled $keys (or $v.storage.enabled $given) (not $v.auth.existingSecret) -}}
  {{- fail "auth.existingSecret is empty: create a secret (kubectl create secret generic shadowserve-auth --from-literal=password=$(openssl rand -hex 24)) and name it, or set auth.enabled: false" -}}
{{- end -}}
{{- if and $v.auth.enabled (not $v.auth.passwordKey) (not $v.tls.usersFromCertificates) -}}
  {{- fail "auth.passwordKey is empty: name the password's key, or let certificates name users (tls.usersFromCertificates)" -}}
{{- end -}}
{{- if and $v.dataPlane.hostNetwork $v.storage.enabled $v.networkPolicy.enabled (not $v.networkPolicy.clients) -}}
  {{- fail "dataPlane.hostNetwork needs networkPolicy.clients with the nodes' addresses ({ipBlock: {cidr: ...}}): policies do not know such pods by label" -}}
{{- end -}}
{{- if and $v.dataPlane.enabled (eq $v.dataPlane.mode "daemonset") (($config.tiers).devices) (not $v.dataPlane.hostPath.disk) (not $v.dataPlane.extraVolumeMounts) -}}
  {{- fail "dataPlane.config.tiers.devices needs dataPlane.hostPath.disk or dataPlane.extraVolumeMounts: a container's own file is lost with it" -}}
{{- end -}}
{{- if and $v.auth.username (not $v.auth.usersKey) $v.storage.enabled -}}
  {{- fail "auth.username needs auth.usersKey: the storage node knows users only from a users file" -}}
{{- end -}}
{{- if and $v.auth.enabled $v.auth.usersKey $v.auth.passwordKey (not $v.auth.username) -}}
  {{- fail "auth.usersKey needs auth.username, the user of the data planes, or auth.passwordKey: \"\" with tls.usersFromCertificates" -}}
{{- end -}}
{{- if and $v.tls.enabled (not $v.tls.existingSecret) (or $v.storage.enabled (not $v.tls.clientExistingSecret)) -}}
  {{- fail "tls.existingSecret is empty: name a secret with tls.crt, tls.key and ca.crt" -}}
{{- end -}}
{{- if and $v.tls.requireClientCertificate (not (and $v.tls.enabled $v.tls.clientExistingSecret)) -}}
  {{- fail "tls.requireClientCertificate needs tls.enabled and tls.clientExistingSecret, the certificate of the data planes" -}}
{{- end -}}
{{- if and $v.tls.usersFromCertificates (not $v.tls.requireClientCertificate) -}}
  {{- fail "tls.usersFromCertificates needs tls.requireClientCertificate" -}}
{{- end -}}
{{- if and $v.tls.usersFromCertificates $v.storage.enabled (not (and $v.auth.enabled $v.auth.usersKey)) -}}
  {{- fail "tls.usersFromCertificates needs auth.enabled and auth.usersKey: without a users file every certificate is the default user" -}}
{{- end -}}
{{- if and $v.dataPlane.enabled (not $v.storage.enabled) (not (or $given $config.tiers)) -}}
  {{- fail "dataPlane.config names neither storage nor tiers, and storage.enabled is false: nothing could be stored" -}}
{{- end -}}
{{- if and $v.engine.enabled (not $v.dataPlane.enabled) (not $v.engine.config.data_plane) -}}
  {{- fail "engine.enabled needs dataPlane.enabled, or engine.config.data_plane" -}}
{{- end -}}
{{- if and $v.metrics.serviceMonitor.enabled $v.networkPolicy.enabled (not $v.networkPolicy.monitoring) -}}
  {{- fail "metrics.serviceMonitor.enabled needs networkPolicy.monitoring, the peers that may read metrics" -}}
{{- end -}}
{{- end }}
