{{- define "kindred.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "kindred.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else if contains (include "kindred.name" .) .Release.Name }}
{{- .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "kindred.name" .) | trunc 63 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "kindred.selector" -}}
app.kubernetes.io/name: {{ include "kindred.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kindred.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "kindred.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/component: {{ ternary "picker" "router" .Values.picker.enabled }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "kindred.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "kindred.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{/* The router's configuration file: the values', and what only the chart knows. */}}
{{- define "kindred.config" -}}
{{- $own := dict "host" "0.0.0.0" "port" 8000 "admin_host" "0.0.0.0" "admin_port" 8001 }}
{{- $_ := set $own "threads" (int .Values.threads) }}
{{- $_ := set $own "drain_ms" (mul (int .Values.drainSeconds) 1000) }}
{{- $services := list }}
{{- range .Values.workers }}
{{- $entry := printf "%s/%s" (default $.Release.Namespace .namespace) .service }}
{{- if .port }}{{ $entry = printf "%s:%s" $entry (toString .port) }}{{ end }}
{{- if .role }}{{ $entry = printf "%s=%s" $entry .role }}{{ end }}
{{- $services = append $services $entry }}
{{- end }}
{{- if $services }}{{ $_ := set $own "kubernetes_service" $services }}{{ end }}
{{- if .Values.apiKeys.secret }}{{ $_ := set $own "api_keys_file" (printf "/etc/kindred/api-keys/%s" .Values.apiKeys.key) }}{{ end }}
{{- if .Values.adminKey.secret }}{{ $_ := set $own "admin_key_file" (printf "/etc/kindred/admin-key/%s" .Values.adminKey.key) }}{{ end }}
{{- if .Values.upstreamKey.secret }}{{ $_ := set $own "upstream_api_key_file" (printf "/etc/kindred/upstream-key/%s" .Values.upstreamKey.key) }}{{ end }}
{{- if .Values.tls.secret }}
{{- $_ := set $own "tls_cert" "/etc/kindred/tls/tls.crt" }}
{{- $_ := set $own "tls_key" "/etc/kindred/tls/tls.key" }}
{{- end }}
{{- if .Values.picker.enabled }}
{{- $_ := set $own "picker_host" "0.0.0.0" }}
{{- $_ := set $own "picker_port" (int .Values.picker.port) }}
{{- if .Values.picker.tls.secret }}
{{- $_ := set $own "picker_tls_cert" "/etc/kindred/picker-tls/tls.crt" }}
{{- $_ := set $own "picker_tls_key" "/etc/kindred/picker-tls/tls.key" }}
{{- end }}
{{- end }}
{{- toYaml (merge $own .Values.config) }}
{{- end }}

{{/* name/secret pairs of the Secrets that are mounted under /etc/kindred */}}
{{- define "kindred.secrets" -}}
{{- $out := dict }}
{{- range $name, $value := dict "api-keys" .Values.apiKeys "admin-key" .Values.adminKey "upstream-key" .Values.upstreamKey "tls" .Values.tls "picker-tls" .Values.picker.tls }}
{{- if $value.secret }}{{ $_ := set $out $name $value.secret }}{{ end }}
{{- end }}
{{- toYaml $out }}
{{- end }}
